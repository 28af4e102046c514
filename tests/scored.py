"""Groups whose values tell group, sample and state, with what their samples are worth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megadiff.train.selection import ScoredGroups
from megadiff.types import Prompt, RolloutGroup, Sampling

GROUP_SIZE = 4
STEPS = 2
TOKENS = 3
CONDITIONING = ("prompt_embeds", "negative_prompt_embeds")


def make_group(index: int, *, num_steps: int = STEPS, group_size: int = GROUP_SIZE) -> RolloutGroup:
    """Return a group with a window of num_steps; without one it has its clean latents alone."""
    sample_G = 100.0 * index + torch.arange(group_size)
    latents_GS = sample_G[:, None] + torch.arange(num_steps + 1) / 10
    return RolloutGroup(
        prompt=Prompt(text="a cat", id=f"{index:016x}"),
        sampling=Sampling(
            height=16,
            width=16,
            num_inference_steps=6,
            sde_window_size=num_steps,
            true_cfg_scale=4.0,
        ),
        sample_indices=tuple(range(group_size)),
        window_start=index if num_steps else 6,
        latents_GSLC=latents_GS[..., None, None].expand(-1, -1, TOKENS, 1),
        log_probs_GW=sample_G[:, None].double().expand(-1, num_steps),
        pixels_GFHWC=torch.zeros(group_size, 1, 2, 2, 3, dtype=torch.uint8),
        schedule=torch.linspace(1, 0, 7),
        conditioning=dict.fromkeys(CONDITIONING, torch.ones(1, 2 + index, 5)),
        policy_version=0,
        replica=f"replica_{index}",
    )


def scored_groups(
    indices: list[int],
    *,
    num_steps: int = 0,
    advantages_PG: Tensor | None = None,
    weights_P: Tensor | None = None,
    **identity: Any,
) -> ScoredGroups:
    """Return these groups. An advantage follows from group and sample, a weight is 1."""
    if advantages_PG is None:
        sample_G = torch.tensor([0.5, 2.0, -1.0, -1.5])
        advantages_PG = torch.stack([sample_G.roll(index) for index in indices])
    return ScoredGroups(
        groups=[make_group(index, num_steps=num_steps) for index in indices],
        advantages_PG=advantages_PG,
        weights_P=torch.ones(len(indices)) if weights_P is None else weights_P,
        **{"seed": 1, "step": 2, **identity},
    )
