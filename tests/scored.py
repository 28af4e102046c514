"""Groups whose values tell group, sample and state, with what their samples are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megadiff.models.adapter import ModelAdapter
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
    if weights_P is None:
        weights_P = torch.ones(len(indices))
    return ScoredGroups(
        groups=[make_group(index, num_steps=num_steps) for index in indices],
        advantages_PG=advantages_PG,
        weights_PG=weights_P[:, None].expand(-1, GROUP_SIZE).contiguous(),
        **{"seed": 1, "step": 2, **identity},
    )


def noise_group(
    adapter: ModelAdapter, sampling: Sampling, index: int, *, num_steps: int, text_dim: int
) -> RolloutGroup:
    """Return a group of GROUP_SIZE samples of random latents and a text of its own length."""
    generator = torch.Generator().manual_seed(index)
    shape = (GROUP_SIZE, num_steps + 1, *adapter.latents_shape(sampling))
    num_tokens = 4 + index
    return replace(
        make_group(index, num_steps=num_steps),
        sampling=replace(sampling, sde_window_size=num_steps, guidance_scale=1.0),
        latents_GSLC=torch.randn(shape, generator=generator),
        log_probs_GW=torch.full((GROUP_SIZE, num_steps), -3.0, dtype=torch.float64),
        schedule=adapter.schedule(sampling),
        conditioning={
            "prompt_embeds": torch.randn(1, num_tokens, text_dim, generator=generator),
            "prompt_mask": torch.ones(1, num_tokens, dtype=torch.bool),
        },
    )
