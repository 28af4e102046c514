"""Get a step's samples: from prompts to scored groups, on every rank of each model group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megadiff.config.schema import RolloutConfig
from megadiff.data.pixels import read_image, scale
from megadiff.models.adapter import ModelAdapter
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import agreed, broadcast_bytes, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.base import RewardContext
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.stages import thinking
from megadiff.rollout.wire import decode_groups, encode_groups
from megadiff.train.replica_figures import draw_work
from megadiff.types import JsonObject, PromptBatch, RolloutGroup, RolloutRequest, Sampling

# reward name, and "total" → [P, G] float32, NaN as Scorer.collect() has it
Rewards = dict[str, Tensor]


class Redrawable(Protocol):
    """A draw of which a part may be missing when replicas are lost."""

    def run(self) -> bool: ...

    def use_version(self, version: int) -> None: ...


def sampling_of(config: RolloutConfig) -> Sampling:
    """Return how every group of the run is sampled: by the keys that Sampling has as well.

    The stage configuration says how the model thinks first.
    """
    names = {field.name for field in fields(Sampling)} & vars(config).keys()
    keys = {name: getattr(config, name) for name in names}
    low, high = config.sde_window_range  # validate() has refused a range of other than two numbers
    # a request's own images have sizes of their own, which its prompt decides
    images = ((config.height, config.width),) if config.images else ()
    keys |= thinking(config.stage_config)

    return Sampling(**keys | {"sde_window_range": (low, high), "images": images})


def sft_sampling(config: RolloutConfig) -> Sampling:
    """Return the sampling of a supervised run's forwards: images without guidance."""
    return replace(unguided(sampling_of(config)), num_frames=1)


def unguided(sampling: Sampling) -> Sampling:
    """Return the sampling without guidance of either kind."""
    return replace(sampling, true_cfg_scale=1.0, guidance_scale=1.0, guidance_scale_2=0.0)


def group_requests(
    batch: PromptBatch,
    sampling: Sampling,
    *,
    group_size: int,
    seed: int,
    step: int,
    policy_version: int,
) -> list[RolloutRequest]:
    """Return one request for each prompt group.

    step: finished steps of the run when it trains on the groups. policy_version: of the policy that
    draws them.
    Groups of one prompt differ in their sample indices, from which the noise follows.
    """
    return [
        RolloutRequest(
            prompt=prompt,
            sampling=sampling,
            sample_indices=tuple(range(repeat * group_size, (repeat + 1) * group_size)),
            seed=seed,
            step=step,
            policy_version=policy_version,
        )
        for prompt, repeat in zip(batch.prompts, batch.repeats, strict=True)
    ]


def share(
    fetched: tuple[list[RolloutGroup], Rewards] | None,
    requests: Sequence[RolloutRequest],
    *,
    mesh: Mesh,
) -> tuple[list[RolloutGroup], Rewards]:
    """Return what the model group's first rank fetched on all of its ranks. Collective."""
    groups, rewards = fetched or ([], {})
    groups = broadcast_groups(groups, len(requests), mesh=mesh)

    # JSON carries a float exactly: peers get the same bits
    scores = {name: value.tolist() for name, value in rewards.items()}
    scores = broadcast_json(scores, source=mesh.model_group_source, group=mesh.cpu_model_group)
    return groups, {name: torch.tensor(value) for name, value in scores.items()}


def open_rewards(
    scorer: Scorer,
    judges: Mapping[str, Sequence[str]],
    sampling: Sampling,
    *,
    mesh: Mesh,
) -> None:
    """Load the rewards where they score, and ask each about a grey picture. Collective.

    So what is missing or wrong is told before step 1.
    judges: `judge.<name>` → base URLs of its servers on this node. Raises AgreedError.
    """
    grey = np.full((sampling.num_frames, sampling.height, sampling.width, 3), 128, np.uint8)

    def open_and_rest() -> None:
        scorer.open(RewardContext(device=mesh.device, judges=judges))
        scorer.try_out(grey)
        scorer.pop_figures()  # of grey pictures
        scorer.sleep()  # what follows needs the GPU's memory

    agreed(open_and_rest, mesh.cpu_group, here=mesh.is_model_group_source)


class Draw:
    """Draw groups on one rank, and score them as they arrive.

    requests: of this rank's groups. timers: of the thread that calls run().
    on_samples: called with the size of each group that arrives.
    """

    def __init__(
        self,
        fleet: Fleet,
        scorer: Scorer,
        requests: Sequence[RolloutRequest],
        *,
        adapter: ModelAdapter,
        timers: Timers,
        on_samples: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.requests = requests
        self._fleet = fleet
        self._scorer = scorer
        self._adapter = adapter
        self._timers = timers
        self._on_samples = on_samples
        self._calls: list[ReplicaCall] | None = None
        # by the request's index, in order of arrival, which is that of their scores
        self._arrived: dict[int, RolloutGroup] = {}
        self._drawing_s = 0.0

    def run(self) -> bool:
        """Ask for the groups that are missing, and submit each to the scorer as it arrives.

        Returns whether all are here; no replica may be left that could draw the others.
        """
        asked = [for_replica(request, self._adapter) for request in self.requests]
        if self._calls is None:
            self._scorer.reset()  # drops what a failed step left behind
            self._calls = self._fleet.plan(asked)

        start_s = time.monotonic()
        with self._timers("rollout"):
            for index, group in self._fleet.generate(asked, self._calls):
                self._arrived[index] = replace(group, prompt=self.requests[index].prompt)
                self._scorer.submit(self._arrived[index])
                self._on_samples(len(group.sample_indices))
        self._drawing_s += time.monotonic() - start_s

        return len(self._arrived) == len(self.requests)

    def work(self, *, names: Iterable[str] = ()) -> JsonObject | None:
        """Return what the replicas did for run(), as draw_work() does; None where it was not."""
        if self._calls is None:
            return None
        return draw_work(self._calls, names=names, drawing_s=self._drawing_s)

    def use_version(self, version: int) -> None:
        """Draw what is missing with another version of the weights."""
        missing = [index not in self._arrived for index in range(len(self.requests))]
        self.requests = [
            replace(request, policy_version=version) if is_missing else request
            for request, is_missing in zip(self.requests, missing, strict=True)
        ]

    def result(self) -> tuple[list[RolloutGroup], Rewards]:
        """Return the groups and rewards in the requests' order; waits for the scores."""
        if not self.requests:
            return [], {}
        with self._timers("reward"):
            scored = self._scorer.collect()

        order = torch.tensor(list(self._arrived)).argsort()  # scores come in order of arrival
        rewards = {name: value[order] for name, value in scored.items()}
        return [self._arrived[index] for index in range(len(self.requests))], rewards

    def conclude(self) -> tuple[list[RolloutGroup], Rewards]:
        """Return the result, and let the rewards give their GPU memory back."""
        result = self.result()
        self._scorer.sleep()
        return result


def for_replica(request: RolloutRequest, adapter: ModelAdapter) -> RolloutRequest:
    """Return the request as a replica gets it: images' pixels and sizes in place of their files.

    Columns of the prompt stay here. Only rewards read them, and they may be large, or no JSON
    values (a parquet file's dates). Raises ValueError for an image that has changed.
    """
    prompt = replace(request.prompt, fields={}, images=())
    if not request.sampling.images:
        return replace(request, prompt=prompt)
    with named(f"prompt {prompt.id} ({prompt.text[:60]!r})"):
        images, sampling = given_images(request.prompt.images, request.sampling, adapter)
    pixels = tuple(image.tobytes() for image in images)
    return replace(request, prompt=prompt, sampling=sampling, images=pixels)


def given_images(
    files: Sequence[str], sampling: Sampling, adapter: ModelAdapter
) -> tuple[list[np.ndarray], Sampling]:
    """Read a prompt's images, uint8 [H, W, 3] each, scaled to what the VAE encodes.

    Returns them, and the sampling with their sizes.
    Raises ValueError for a file that is no readable image, and for sizes that the model refuses.
    """
    images = []

    for file in files:
        pixels_HWC = read_image(file)
        rows, columns = pixels_HWC.shape[:2]
        with named(file):
            height, width = adapter.image_size(rows, columns, sampling)
        images.append(scale(pixels_HWC, height, width))
    sampling = replace(sampling, images=tuple(image.shape[:2] for image in images))
    with named(", ".join(files)):
        adapter.validate(sampling)
    return images, sampling


@contextmanager
def named(what: str) -> Iterator[None]:
    """Put a name in front of the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def broadcast_groups(groups: list[RolloutGroup], count: int, *, mesh: Mesh) -> list[RolloutGroup]:
    """Return the groups of the model group's first rank on all its peers. Collective.

    Peers get no columns of prompts, and of a video the middle frame: all that they read.
    count: the number of groups, known to peers too.
    """
    if mesh.sp * mesh.tp == 1:
        return groups

    received = []
    # one broadcast for each group: its schedule is its own, and one body bounds the memory
    for index in range(count):
        payload = None
        if mesh.is_model_group_source:
            group = groups[index]
            prompt = replace(group.prompt, fields={})
            frames = group.middle_frames_GHWC[:, None]
            payload = encode_groups([replace(group, prompt=prompt, pixels_GFHWC=frames)])
        payload = broadcast_bytes(
            payload, source=mesh.model_group_source, group=mesh.cpu_model_group
        )
        received += [groups[index]] if mesh.is_model_group_source else decode_groups(payload)

    return received
