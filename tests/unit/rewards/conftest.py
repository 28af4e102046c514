from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.data.prompts import prompt_id
from megadiff.rewards.base import RewardSample
from megadiff.rewards.remote import TOKEN_VARIABLE
from megadiff.rewards.score import Scorer
from megadiff.types import Prompt, RolloutGroup, Sampling


def _prompt(text: str, /, **fields: object) -> Prompt:
    return Prompt(text=text, id=prompt_id(text, " "), fields=fields)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def make_sample() -> Callable[..., RewardSample]:
    """(pixels [H, W, 3] or [F, H, W, 3], prompt text, **row fields) → RewardSample."""

    def make(pixels: np.ndarray, text: str = "a red circle", /, **fields: object) -> RewardSample:
        pixels = pixels if pixels.ndim == 4 else pixels[None]
        return RewardSample(pixels=pixels, prompt=_prompt(text, **fields), sample_index=0)

    return make


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """(**name=RewardConfig(...)) → Scorer, closed at the end."""
    with ExitStack() as stack:

        def make(*, num_workers: int = 2, **configs: RewardConfig) -> Scorer:
            return stack.enter_context(closing(Scorer(configs, num_workers=num_workers)))

        yield make


@pytest.fixture
def samples(make_sample: Callable[..., RewardSample], tmp_path: Path) -> list[RewardSample]:
    """4 videos of noise for one prompt, with two images and columns as a parquet file has them."""
    generator = np.random.default_rng(0)
    columns = {"day": datetime.date(2026, 11, 24), "share": float("nan"), "tags": ["é", None]}
    files = [tmp_path / "first.png", tmp_path / "ünïcode"]
    for file in files:
        file.write_bytes(generator.bytes(100))

    def make(index: int) -> RewardSample:
        pixels = generator.integers(0, 256, (2, 5, 7, 3), np.uint8)
        sample = make_sample(pixels, "a “red” 円\0", **columns)
        prompt = replace(sample.prompt, negative_text="ugly", images=tuple(map(str, files)))
        return replace(sample, prompt=prompt, sample_index=index)

    return [make(index) for index in range(4)]


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
