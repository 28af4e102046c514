"""A fleet in the test's own process: pixels and latents follow from a sample's identity, as a
replica's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megadiff.diffusion.noise import group_key, initial_latents_rows, sample_keys
from megadiff.parallel.collectives import agreed
from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.train.sampling import Redrawable
from megadiff.types import RolloutGroup, RolloutRequest

TOKENS, CHANNELS, SIDE = 4, 6, 8


class StubFleet:
    """Answers the last request first: nothing may depend on the order in which groups arrive."""

    replicas = ()

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    def plan(self, requests: Sequence[RolloutRequest]) -> list[ReplicaCall]:
        return [ReplicaCall(range(len(requests)), 0)]

    def generate(
        self, requests: Sequence[RolloutRequest], calls: Sequence[ReplicaCall] = ()
    ) -> Iterator[tuple[int, RolloutGroup]]:
        self.requests += requests
        for index in reversed(range(len(requests))):
            yield index, _group(requests[index])


def finish(draw: Redrawable, *, here: bool) -> None:
    """Run a draw of a fleet that loses no replica, as RunReplicas.finish() does."""

    def run() -> None:
        assert draw.run()

    agreed(run, dist.group.WORLD, here=here)


def _group(request: RolloutRequest) -> RolloutGroup:
    group = group_key(seed=request.seed, step=request.step, prompt_id=request.prompt.id)
    keys = sample_keys(group, request.sample_indices)
    latents_GLC = initial_latents_rows((TOKENS, CHANNELS), keys)
    num_samples = len(latents_GLC)
    colours_G3 = (latents_GLC[:, 0, :3].sigmoid() * 255).to(torch.uint8)
    pixels_GFHWC = colours_G3.view(num_samples, 1, 1, 1, 3).expand(-1, 1, SIDE, SIDE, -1)
    return RolloutGroup(
        prompt=request.prompt,
        sampling=request.sampling,
        sample_indices=request.sample_indices,
        window_start=1,
        latents_GSLC=latents_GLC[:, None],
        log_probs_GW=torch.zeros(num_samples, 0),
        pixels_GFHWC=pixels_GFHWC.contiguous(),
        schedule=torch.tensor([1.0, 0.0]),
        conditioning={},
        policy_version=request.policy_version or 0,
        replica="stub",
    )
