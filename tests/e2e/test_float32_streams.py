"""Replicas in bfloat16: what the parity gap is made of, and what is left of it with float32 streams
on both sides.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from megadiff.models.qwen_image.streams import keep_streams_in_float32
from megadiff.types import RolloutGroup
from tests.deep_model import write_deep_model
from tests.e2e.recompute import gap
from tests.e2e.replica import REQUEST, SAMPLING, image, start

GUIDED = replace(REQUEST, sampling=replace(SAMPLING, height=128, width=128, true_cfg_scale=4.0))


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep_model(tiny_model, tmp_path_factory.mktemp("deep") / "model", num_layers=8)


def _sampled(model: Path, folder: Path, *options: str) -> RolloutGroup:
    folder.mkdir()
    server = start(model, folder, "--dtype", "bfloat16", *options)
    try:
        image(server.client)  # the stock pipeline works with it, too
        return server.client.generate(GUIDED)
    finally:
        server.end()


def _transformer(model: Path, *, streams: bool) -> QwenImageTransformer2DModel:
    transformer = QwenImageTransformer2DModel.from_pretrained(
        model / "transformer", torch_dtype=torch.bfloat16
    )
    if streams:
        keep_streams_in_float32(transformer, torch.bfloat16)
    return transformer


def test_streams_in_float32_take_the_gap_away(model: Path, tmp_path: Path) -> None:
    plain = _sampled(model, tmp_path / "plain")
    wide = _sampled(model, tmp_path / "wide", "--float32-streams")
    gaps = {
        (name, streams): gap(model, group, _transformer(model, streams=streams))
        for name, group in (("plain", plain), ("wide", wide))
        for streams in (False, True)
    }
    assert gaps["wide", True] < gaps["plain", False] / 2.5, gaps
    assert gaps["wide", True] < min(gaps["wide", False], gaps["plain", True]) / 2, (
        gaps
    )  # both sides, or it is no use
