"""Z-Image under tensor parallelism, sequence parallelism and Ulysses against the unsharded stock
transformer, on gloo processes.

Texts fill up to different multiples of 32, so that rows have masks and positions of their own; 15
image tokens are filled up to 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

from megadiff.models.z_image.adapter import ZImageAdapter
from megadiff.models.z_image.attention import ZImageAttention
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

SAMPLING = Sampling(height=48, width=80, num_inference_steps=4, guidance_scale=2.0)
TEXT_DIM = 24
TEXT_LENGTHS = (9, 40, 33, 5)
# the stock module turns in float32 whatever its dtype, so that float64 shows no more
DTYPES = [torch.float32]
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
    adapter: ZImageAdapter,
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
        text_lengths=TEXT_LENGTHS,
    )
    velocity_BLC = adapter.velocity(
        transformer, inputs.latents_BLC, inputs.sigma_B, inputs.conditioning, SAMPLING
    )
    log_prob_B = inputs.log_probs(velocity_BLC)
    if backward:
        (log_prob_B.sum() + (velocity_BLC * inputs.weight_BLC).sum()).backward()
    return {"velocity": velocity_BLC.detach(), "log_prob": log_prob_B.detach()}


CASE = Case(adapter=ZImageAdapter, result=_result)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of which every part matters, and what it answers unsharded."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[8, 8, 8],
        axes_lens=[96, 32, 32],
    )
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            # larger weights amplify rounding: with 0.08 two microbatches of the unsharded module
            # differ from one batch by 5.7e-6 already
            is_norm = p.ndim == 1 and name.endswith(".weight")
            p.copy_(torch.randn_like(p) * (0.06 if p.ndim > 1 else 0.2) + is_norm)
    transformer.save_pretrained(folder / "transformer")
    write_references(transformer, CASE, folder, dtypes=DTYPES)
    return folder


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_the_unsharded_transformer(world_size: int, pipeline: Path) -> None:
    check_parity(CASE, pipeline, LAYOUTS[world_size], DTYPES, world_size)


@contextmanager
def _all_turned_by_the_first_row(module: nn.Module) -> Iterator[None]:
    stock = ZImageAttention.__call__

    def broken(self, attn, hidden_states, freqs_cis=None, **kwargs):
        return stock(self, attn, hidden_states, freqs_cis=freqs_cis[:1], **kwargs)

    with patch.object(ZImageAttention, "__call__", broken):
        yield


OMISSIONS = {
    "sum_of_head_norms": Omission(
        layout=Layout(tp=2, sequence_parallel=False),
        without=patched("megadiff.parallel.regions.sum_over_tp", by=lambda *args: None),
        wrong=("norm_q", "norm_k"),
        only=True,
    ),
    "sum_of_what_is_before_and_after_the_stream": Omission(
        layout=Layout(tp=2),
        without=patched("megadiff.parallel.regions.sum_over_tp", by=lambda *args: None),
        wrong=(
            "x_pad_token",
            "cap_pad_token",
            "all_x_embedder",
            "cap_embedder",
            "noise_refiner",
            "context_refiner",
            "t_embedder",
            "all_final_layer",
        ),
    ),
    "sum_over_sp": Omission(
        layout=Layout(sp=2),
        without=patched(
            "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
        ),
        wrong=("x_pad_token", "context_refiner", "layers.0", "all_final_layer"),
    ),
}


def test_each_reduction_is_needed(pipeline: Path) -> None:
    run_ranks(_omission_worker, 2, pipeline)


def _omission_worker(pipeline: Path) -> None:
    check_omissions(CASE, pipeline, OMISSIONS, torch.float32)
    with (
        Ranks(CASE, pipeline, Layout(tp=2), torch.float32) as ranks,
        pytest.raises(AssertionError, match="velocity differs by"),
    ):
        ranks.check_result(_all_turned_by_the_first_row)


def test_heads_that_cannot_be_split_are_refused(pipeline: Path) -> None:
    run_ranks(_refusal_worker, 3, pipeline)


def _refusal_worker(pipeline: Path) -> None:
    with pytest.raises(ValueError, match=r"3\*1 = 3 does not divide the model's 4 attention heads"):
        Ranks(CASE, pipeline, Layout(sp=3), torch.float32).__enter__()
