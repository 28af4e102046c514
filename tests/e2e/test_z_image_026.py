"""Z-Image in a replica of the GPU hosts' vllm-omni, 0.26."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from diffusers import ZImageTransformer2DModel

from examples.tiny_models.z_image import write_tiny_pipeline
from megadiff.models.registry import build_adapter
from megadiff.types import Prompt, RolloutRequest, Sampling
from tests.e2e.recompute import adapter_gap
from tests.e2e.replica import start


def test_log_probs_are_the_trainers(tmp_path: Path) -> None:
    """The GPU host's version, whose compiled SiluAndMul does not load beside this torch."""
    overlay = os.environ.get("MEGADIFF_OVERLAY026", "")
    if not Path(overlay, "vllm_omni").is_dir():
        pytest.skip("MEGADIFF_OVERLAY026 names no folder with vllm-omni 0.26")
    model = tmp_path / "model"
    write_tiny_pipeline(model)
    adapter = build_adapter(model)
    transformer = ZImageTransformer2DModel.from_pretrained(model / "transformer")
    sampling = Sampling(height=64, width=64, num_inference_steps=8, guidance_scale=4.5)
    requests = [
        RolloutRequest(
            prompt=Prompt(text=text, id=letter * 16),
            sampling=sampling,
            sample_indices=(0, 1),
            seed=0,
            step=1,
        )
        for letter, text in (("a", "a red circle"), ("b", "a wide photograph of a lake " * 9))
    ]
    server = start(model, tmp_path, fresh=True, overlay=overlay)
    try:
        assert server.client.health()["vllm_omni"].startswith("0.26.")
        for group in server.client.generate_batch(requests):
            assert adapter_gap(adapter, transformer, group) <= 1e-7
    finally:
        server.end()
