"""One step's samples: from prompts to scored groups, on every rank of a data-parallel rank's model group."""

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
    """How every group of the run is sampled."""
    low, high = config.sde_window_range
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
        sde_window_range=(low, high),
    )


def sft_sampling(config: RolloutConfig) -> Sampling:
    """Of a supervised run's forwards: images without guidance, whatever its evaluations sample."""
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
    """One request per prompt group. Groups of one prompt have different samples, as noise follows from their indices."""
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
    """Collective. The model group's first rank fetches and scores (scoring starts as groups arrive), its peers receive.

    Timer `sample`: until every source rank has its samples and scores; `rollout` and `reward` are this rank's own within it.
    Raises AgreedError on every rank of the world when any replica or reward fails.
    """
    waiting = (
        nullcontext() if mesh.is_model_group_source else timers("rollout")
    )  # the peers' GPUs hold replicas too
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
    return [arrived[index] for index in range(len(requests))], {
        name: value[order] for name, value in scored.items()
    }


def for_replica(request: RolloutRequest) -> RolloutRequest:
    """With the first frame's pixels, where there is one, in place of its file. Rewards read a prompt's fields, replicas do
    not: they may be large, or no JSON values (a parquet file's dates). Raises ValueError for an image that has changed."""
    prompt, sampling = request.prompt, request.sampling
    plain = replace(request, prompt=replace(prompt, fields={}, image=""))
    if not sampling.first_frame:
        return plain
    return replace(plain, first_frame=first_frame_of(prompt, sampling).tobytes())


def first_frame_size(sampling: Sampling) -> tuple[int, int] | None:
    """(height, width) that the prompts' images must have; None where no image is given to the model."""
    return (sampling.height, sampling.width) if sampling.first_frame else None


def check_call(sampling: Sampling, num_groups: int, *, what: str) -> None:
    """Raises ValueError when so many groups' first frames are more than a replica takes in a call. what: that makes it."""
    size = dict(height=sampling.height, width=sampling.width)
    most = max(1, Limits().num_first_frames(**size))
    if sampling.first_frame and num_groups > most:
        raise ValueError(
            f"rollout.batch_size makes {what} ask for {num_groups} groups in a call, each with a first frame of "
            f"{sampling.width}x{sampling.height}; a replica takes {most} of them ({Limits().json_bytes >> 20} MiB): set "
            f"rollout.batch_size<={most}"
        )


def first_frame_of(prompt: Prompt, sampling: Sampling) -> np.ndarray:
    """uint8 [H, W, 3]. Raises ValueError as read_first_frame does."""
    where = f"prompt {prompt.id} ({prompt.text[:60]!r})"
    return read_first_frame(prompt.image, height=sampling.height, width=sampling.width, where=where)


def share(groups: list[RolloutGroup], count: int, *, mesh: Mesh) -> list[RolloutGroup]:
    """Groups of the model group's first rank on all its peers, there with the middle frame alone of a video."""
    if mesh.sp * mesh.tp == 1:
        return groups
    plain = [_for_peers(group) for group in groups]
    payloads = (
        [encode_groups([group]) for group in plain]
        if mesh.is_model_group_source
        else [None] * count
    )
    source, peers = mesh.model_group_source, mesh.cpu_model_group
    received = [broadcast_bytes(payload, source=source, group=peers) for payload in payloads]
    return (
        groups
        if mesh.is_model_group_source
        else [decode_groups(payload)[0] for payload in received]
    )


def _for_peers(group: RolloutGroup) -> RolloutGroup:
    """Less what only rewards and samples read: columns of the prompt, and all frames but that of the diversity figures."""
    middle = len(group.trajectories[0].pixels) // 2
    trajectories = tuple(
        replace(one, pixels=one.pixels[middle : middle + 1]) for one in group.trajectories
    )
    return replace(group, prompt=replace(group.prompt, fields={}), trajectories=trajectories)


def share_rewards(rewards: Rewards, *, mesh: Mesh) -> Rewards:
    """Rewards of the model group's first rank on all its peers, bit for bit (JSON carries a float exactly)."""
    plain = {name: value.tolist() for name, value in rewards.items()}
    plain = broadcast_json(plain, source=mesh.model_group_source, group=mesh.cpu_model_group)
    return {name: torch.tensor(value) for name, value in plain.items()}  # type: ignore[union-attr]
