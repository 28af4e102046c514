"""Get a step's samples: from prompts to scored groups, on every rank of each model group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megadiff.config.schema import RolloutConfig
from megadiff.data.pixels import read_first_frame
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import agreed, broadcast_bytes, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.limits import Limits
from megadiff.rollout.wire import decode_groups, encode_groups
from megadiff.types import Prompt, PromptBatch, RolloutGroup, RolloutRequest, Sampling

Rewards = dict[str, Tensor]  # reward name, and "total" → [P, G] float32


def sampling_of(config: RolloutConfig) -> Sampling:
    """Return how every group of the run is sampled."""
    return Sampling(
        height=config.height,
        width=config.width,
        num_frames=config.num_frames,
        first_frame=config.first_frame,
        num_inference_steps=config.num_inference_steps,
        true_cfg_scale=config.true_cfg_scale,
        guidance_scale=config.guidance_scale,
        guidance_scale_2=config.guidance_scale_2,
        sde_type=config.sde_type,
        eta=config.eta,
        sde_window_size=config.sde_window_size,
        # validate() has refused a range of more or fewer than two numbers
        sde_window_range=tuple(config.sde_window_range),  # type: ignore[arg-type]  # see above
    )


def sft_sampling(config: RolloutConfig) -> Sampling:
    """Return the sampling of a supervised run's forwards: images without guidance."""
    return replace(
        sampling_of(config),
        num_frames=1,
        true_cfg_scale=1.0,
        guidance_scale=1.0,
        guidance_scale_2=0.0,
    )


def group_requests(
    batch: PromptBatch,
    *,
    sampling: Sampling,
    group_size: int,
    seed: int,
    step: int,
    policy_version: int | None,
) -> list[RolloutRequest]:
    """Return one request for each prompt group.

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


def sample_and_score(
    fleet: Fleet, scorer: Scorer, requests: Sequence[RolloutRequest], *, mesh: Mesh, timers: Timers
) -> tuple[list[RolloutGroup], Rewards]:
    """Get the groups and their rewards. Collective.

    The model group's first rank fetches and scores (scoring starts as groups arrive); its peers
    receive. Timer `sample` runs until every source rank has its samples and scores; `rollout` and
    `reward` are this rank's own within it.
    Raises AgreedError on every rank of the world when any replica or reward fails.
    """
    # the peers' GPUs hold replicas too, so their waiting is time of the rollout
    waiting = nullcontext() if mesh.is_model_group_source else timers("rollout")
    with timers("sample"), waiting:
        fetched = agreed(
            lambda: _fetch_and_score(fleet, scorer, requests, timers=timers),
            mesh.cpu_group,
            here=mesh.is_model_group_source,
        )
    groups, rewards = fetched or ([], {})
    return share(groups, len(requests), mesh=mesh), share_rewards(rewards, mesh=mesh)


def _fetch_and_score(
    fleet: Fleet, scorer: Scorer, requests: Sequence[RolloutRequest], *, timers: Timers
) -> tuple[list[RolloutGroup], Rewards]:
    if not requests:
        return [], {}
    arrived: dict[int, RolloutGroup] = {}
    scorer.reset()  # drops what a failed step left behind
    with timers("rollout"):
        for index, group in fleet.generate([for_replica(request) for request in requests]):
            arrived[index] = replace(group, prompt=requests[index].prompt)
            scorer.submit(arrived[index])
    with timers("reward"):
        scored = scorer.collect()
    order = torch.tensor(list(arrived)).argsort()  # scores come in order of arrival
    rewards = {name: value[order] for name, value in scored.items()}
    return [arrived[index] for index in range(len(requests))], rewards


def for_replica(request: RolloutRequest) -> RolloutRequest:
    """Return the request as a replica gets it: a first frame's pixels in place of its file.

    Columns of the prompt stay here. Only rewards read them, and they may be large, or no JSON
    values (a parquet file's dates). Raises ValueError for an image that has changed.
    """
    first_frame = b""
    if request.sampling.first_frame:
        first_frame = first_frame_of(request.prompt, request.sampling).tobytes()
    prompt = replace(request.prompt, fields={}, image="")
    return replace(request, prompt=prompt, first_frame=first_frame)


def first_frame_size(sampling: Sampling) -> tuple[int, int] | None:
    """Return the prompts' image size (height, width), None where the model is given no image."""
    return (sampling.height, sampling.width) if sampling.first_frame else None


def check_call(sampling: Sampling, num_groups: int, *, what: str) -> None:
    """Check the number of groups in a call against what a replica takes. what: makes the call.

    Raises ValueError when their first frames are too many.
    """
    limits = Limits()
    most = max(1, limits.num_first_frames(height=sampling.height, width=sampling.width))
    if sampling.first_frame and num_groups > most:
        raise ValueError(
            f"rollout.batch_size makes {what} ask for {num_groups} groups in a call, each with a "
            f"first frame of {sampling.width}x{sampling.height}; a replica takes {most} of them "
            f"({limits.json_bytes >> 20} MiB): set rollout.batch_size<={most}"
        )


def first_frame_of(prompt: Prompt, sampling: Sampling) -> np.ndarray:
    """Read uint8 [H, W, 3]. Raises ValueError as read_first_frame does."""
    where = f"prompt {prompt.id} ({prompt.text[:60]!r})"
    return read_first_frame(prompt.image, height=sampling.height, width=sampling.width, where=where)


def share(groups: list[RolloutGroup], count: int, *, mesh: Mesh) -> list[RolloutGroup]:
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
        if not mesh.is_model_group_source:
            received += decode_groups(payload)
    return groups if mesh.is_model_group_source else received


def share_rewards(rewards: Rewards, *, mesh: Mesh) -> Rewards:
    """Return the rewards of the model group's first rank on all its peers, bit for bit.

    JSON carries a float exactly.
    """
    plain = {name: value.tolist() for name, value in rewards.items()}
    received = broadcast_json(plain, source=mesh.model_group_source, group=mesh.cpu_model_group)
    return {name: torch.tensor(value) for name, value in received.items()}
