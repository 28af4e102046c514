"""A fleet in the test's own process: pixels and latents follow from a sample's identity, as a replica's do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megadiff.diffusion.noise import initial_latents
from megadiff.types import RolloutGroup, RolloutRequest, Trajectory

TOKENS, CHANNELS, SIDE = 4, 6, 8


class StubFleet:
    """Answers the last request first: nothing may depend on the order in which groups arrive."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        self.requests += requests
        for index in reversed(range(len(requests))):
            yield index, _group(requests[index])


def _group(request: RolloutRequest) -> RolloutGroup:
    return RolloutGroup(
        prompt=request.prompt,
        sampling=request.sampling,
        schedule=torch.tensor([1.0, 0.0]),
        conditioning={},
        trajectories=tuple(_trajectory(request, index) for index in request.sample_indices),
        policy_version=request.policy_version or 0,
        replica="stub",
    )


def _trajectory(request: RolloutRequest, index: int) -> Trajectory:
    identity = {
        "seed": request.seed,
        "step": request.step,
        "prompt_id": request.prompt.id,
        "sample_index": index,
    }
    latents_LC = initial_latents((TOKENS, CHANNELS), **identity)
    pixel = (latents_LC[0, :3].sigmoid() * 255).to(torch.uint8)
    return Trajectory(
        latents_SLC=latents_LC[None],
        sigmas=torch.zeros(1),
        timesteps=torch.zeros(0),
        log_probs=torch.zeros(0),
        window_start=1,
        pixels=pixel.expand(1, SIDE, SIDE, 3).contiguous(),
        prompt_id=request.prompt.id,
        sample_index=index,
        policy_version=request.policy_version or 0,
    )
