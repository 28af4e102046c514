from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megadiff.data.prompts import prompt_id
from megadiff.rewards.base import RewardSample
from megadiff.types import Prompt, RolloutGroup, Sampling


def _prompt(text: str, /, **fields: object) -> Prompt:
    return Prompt(text=text, id=prompt_id(text, " "), fields=fields)


@pytest.fixture
def make_sample() -> Callable[..., RewardSample]:
    """(pixels [H, W, 3] or [F, H, W, 3], prompt text, **row fields) → RewardSample."""

    def make(pixels: np.ndarray, text: str = "a red circle", /, **fields: object) -> RewardSample:
        pixels = pixels if pixels.ndim == 4 else pixels[None]
        return RewardSample(pixels=pixels, prompt=_prompt(text, **fields), sample_index=0)

    return make


@pytest.fixture
def make_group() -> Callable[..., RolloutGroup]:
    """(pixel value of each sample, prompt text) → RolloutGroup of flat grey images."""

    def make(values: list[int], text: str = "a red circle") -> RolloutGroup:
        prompt = _prompt(text)
        pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1, 1)
        return RolloutGroup(
            prompt=prompt,
            sampling=Sampling(height=8, width=8, num_inference_steps=2),
            sample_indices=tuple(range(len(values))),
            window_start=0,
            latents_GSLC=torch.zeros(len(values), 1, 4, 2),
            log_probs_GW=torch.zeros(len(values), 0),
            pixels_GFHWC=pixels.expand(-1, 1, 8, 8, 3).contiguous(),
            schedule=torch.tensor([1.0, 0.5, 0.0]),
            conditioning={},
            policy_version=0,
            replica="r0",
        )

    return make
