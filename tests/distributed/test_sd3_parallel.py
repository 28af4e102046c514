"""Stable Diffusion 3.5 under tensor parallelism, sequence parallelism and Ulysses against the
unsharded stock transformer, on gloo processes.

Some blocks attend to the image twice. The stock forward makes tokens of [B, C, H, W] itself, and
adds positions to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from megadiff.models.sd3.adapter import SD3Adapter
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import Sampling
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_model import (
    Case,
    Layout,
    Omission,
    Ranks,
    check_omissions,
    check_parity,
    draw_inputs,
    patched,
    write_references,
)

SAMPLING = Sampling(height=64, width=48, num_inference_steps=4, guidance_scale=2.0)
TEXT_DIM = 24
TEXT_LENGTH = 6  # the same of all rows, and nothing is masked
POOLED_DIM = 20
DTYPES = [torch.float64, torch.float32]
LAYOUTS = {
    1: [Layout()],
    2: [
        Layout(tp=2, num_microbatches=2),
        Layout(tp=2, sequence_parallel=False, budget=1),
        Layout(sp=2),
        Layout(num_microbatches=2),
    ],
    4: [Layout(tp=4), Layout(tp=2, sp=2, budget=0.5)],
}


def _result(
    transformer: nn.Module,
    adapter: SD3Adapter,
    dtype: torch.dtype,
    samples: slice,
    *,
    backward: bool = True,
) -> dict[str, Tensor]:
    """The guided velocity and log_probs of samples; backward adds the gradient of a sum of all."""
    inputs = draw_inputs(
        adapter.latents_shape(SAMPLING),
        text_dim=TEXT_DIM,
        dtype=dtype,
        samples=samples,
        text_lengths=(TEXT_LENGTH,) * 4,
    )
    generator = torch.Generator().manual_seed(2)
    texts = {}
    for side in ("", "negative_"):
        texts[f"{side}prompt_embeds"] = inputs.conditioning[f"{side}prompt_embeds"]
        pooled_BD = torch.randn(4, POOLED_DIM, generator=generator, dtype=torch.float64)
        texts[f"{side}pooled_prompt_embeds"] = pooled_BD[samples].to(dtype)
    velocity_BLC = adapter.velocity(
        transformer, inputs.latents_BLC, inputs.sigma_B, texts, SAMPLING
    )
    log_prob_B = inputs.log_probs(velocity_BLC)
    if backward:
        (log_prob_B.sum() + (velocity_BLC * inputs.weight_BLC).sum()).backward()
    return {"velocity": velocity_BLC.detach(), "log_prob": log_prob_B.detach()}


CASE = Case(adapter=SD3Adapter, result=_result)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of which every part matters, and what it answers unsharded."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=64,
        pooled_projection_dim=POOLED_DIM,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            is_norm = p.ndim == 1 and name.endswith(".weight")
            # smaller ones leave keys' biases a gradient that is float32's rounding alone
            p.copy_(torch.randn_like(p) * (0.12 if p.ndim > 1 else 0.2) + is_norm)
    transformer.save_pretrained(folder / "transformer")
    write_references(transformer, CASE, folder, dtypes=DTYPES)
    return folder


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_the_unsharded_transformer(world_size: int, pipeline: Path) -> None:
    dtypes = DTYPES if world_size < 4 else [torch.float32]  # which shows what float64 would
    check_parity(CASE, pipeline, LAYOUTS[world_size], dtypes, world_size)


OMISSIONS = {
    "sum_of_head_norms": Omission(
        layout=Layout(tp=2, sequence_parallel=False),
        without=patched("megadiff.parallel.regions.sum_over_tp", by=lambda *args: None),
        wrong=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        only=True,
    ),
    "sum_of_what_is_before_and_after_the_stream": Omission(
        layout=Layout(tp=2),
        without=patched("megadiff.parallel.regions.sum_over_tp", by=lambda *args: None),
        wrong=("pos_embed.proj", "context_embedder", "time_text_embed", "norm_out", "proj_out"),
    ),
    "sum_over_sp": Omission(
        layout=Layout(sp=2),
        without=patched(
            "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
        ),
        wrong=("pos_embed.proj", "attn2", "transformer_blocks.0", "proj_out"),
    ),
}


@contextmanager
def _no_constants() -> Iterator[None]:
    with patch.object(SourceFolder, "read_constants", lambda *args: None):
        yield


def test_each_reduction_is_needed(pipeline: Path) -> None:
    run_ranks(_omission_worker, 2, pipeline)


def _omission_worker(pipeline: Path) -> None:
    check_omissions(CASE, pipeline, OMISSIONS, torch.float32)
    with (
        _no_constants(),
        Ranks(CASE, pipeline, Layout(tp=2), torch.float32) as ranks,
        pytest.raises(AssertionError, match="velocity differs by"),
    ):
        ranks.check_result()
