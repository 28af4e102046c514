"""Tensor parallelism, sequence parallelism and Ulysses against the unsharded diffusers transformer,
on gloo processes.

Samples have texts of different odd lengths, and 15 image tokens, which no number of ranks divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.parallel import regions
from megadiff.types import Sampling
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_model import (
    TOLERANCES,
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

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 8, 16
SAMPLING = Sampling(height=48, width=80, num_inference_steps=4, true_cfg_scale=2.0)
TEXT_DIM = 24
LAYOUTS = {
    1: [Layout(), Layout(budget=0.5, num_microbatches=4)],
    2: [
        Layout(tp=2, num_microbatches=2),
        Layout(tp=2, budget=1),
        Layout(tp=2, sequence_parallel=False),
        Layout(sp=2),
        Layout(num_microbatches=2),
    ],
    4: [
        Layout(tp=4),
        Layout(tp=4, sequence_parallel=False),
        Layout(tp=2),
        Layout(tp=2, sequence_parallel=False, budget=0.5),
        Layout(tp=2, sp=2, budget=0.5),
        Layout(tp=2, sp=2, sequence_parallel=False),
    ],
    8: [Layout(tp=4), Layout(tp=4, sequence_parallel=False), Layout(tp=2, sp=2)],
}
DTYPES = {1: list(TOLERANCES), 2: list(TOLERANCES), 4: [torch.float64], 8: [torch.float32]}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of which every part matters, and what it answers unsharded:
    reference_DTYPE.safetensors.
    """
    folder = tmp_path_factory.mktemp("model")
    transformer = _random_transformer()
    transformer.save_pretrained(folder / "transformer")
    write_references(transformer, CASE, folder, dtypes=list(TOLERANCES))
    return folder


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_the_unsharded_transformer(world_size: int, pipeline: Path) -> None:
    check_parity(CASE, pipeline, LAYOUTS[world_size], DTYPES[world_size], world_size)


def _own_part(
    output: Tensor, x: Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> SimpleNamespace:
    """In place of a reduce-scatter."""
    output.copy_(x.chunk(group.size())[group.rank()])
    return SimpleNamespace(wait=lambda: None)


@contextmanager
def _no_input_sum_in_mlp(module: nn.Module) -> Iterator[None]:
    layers = [layer for layer in module.modules() if getattr(layer, "allreduce_dgrad", False)]
    assert len(layers) == 2 * NUM_LAYERS
    for layer in layers:
        layer.allreduce_dgrad, layer.disable_grad_reduce = False, True
    yield


WITHOUT_SP, WITH_SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2)
PARALLEL = "megadiff.parallel"
OMISSIONS = {
    "sum_of_head_norms": Omission(
        layout=WITHOUT_SP,
        without=patched(f"{PARALLEL}.regions.sum_over_tp", by=lambda *args: None),
        wrong=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        only=True,
    ),
    "sum_of_replicated_weights": Omission(
        layout=WITH_SP,
        without=patched(f"{PARALLEL}.regions.sum_over_tp", by=lambda *args: None),
        wrong=(
            "img_in",
            "txt_in",
            "txt_norm",
            "time_text_embed",
            "norm_out",
            "proj_out",
            "norm_q",
            "to_out.0.bias",
        ),
    ),
    "modulation_with_sp": Omission(
        layout=WITH_SP,
        without=patched(
            f"{PARALLEL}.linear.gather_features_for_parts", by=regions.gather_features_for_all
        ),
        wrong=("img_mod", "txt_mod", "time_text_embed"),
        only=True,
    ),
    "modulation_input_without_sp": Omission(
        layout=WITHOUT_SP,
        without=patched(f"{PARALLEL}.linear.copy_to_group", by=lambda x, group: x),
        wrong=("time_text_embed",),
        only=True,
    ),
    "attention_input_with_sp": Omission(
        layout=WITH_SP,
        without=patched(f"{PARALLEL}.attention.gather_for_parts", by=regions.gather_for_all),
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "attention_input_without_sp": Omission(
        layout=WITHOUT_SP,
        without=patched(f"{PARALLEL}.attention.copy_to_group", by=lambda x, group: x),
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "mlp_input_with_sp": Omission(
        layout=WITH_SP,
        without=patched(
            "megatron.core.tensor_parallel.layers.dist_reduce_scatter_func", by=_own_part
        ),
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "mlp_input_without_sp": Omission(
        layout=WITHOUT_SP,
        without=_no_input_sum_in_mlp,
        wrong=("img_in", "txt_in", "transformer_blocks.0"),
    ),
    "sum_over_sp": Omission(
        layout=Layout(sp=2),
        without=patched(
            "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
        ),
        wrong=("img_in", "proj_out", "transformer_blocks", "img_mod"),
    ),
    "sum_over_dp": Omission(
        layout=Layout(),
        without=patched(
            "tests.distributed.sharded_model.sum_over_data_parallel", by=lambda gradient: None
        ),
        wrong=("img_in", "proj_out", "transformer_blocks", "img_mod"),
    ),
}


def test_each_reduction_is_needed(pipeline: Path) -> None:
    run_ranks(_omission_worker, 2, pipeline)


def _omission_worker(pipeline: Path) -> None:
    check_omissions(CASE, pipeline, OMISSIONS, torch.float64)


def test_what_cannot_be_split_is_refused(pipeline: Path) -> None:
    run_ranks(_refusal_worker, 3, pipeline)


def _refusal_worker(pipeline: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"parallel\.tp=3 does not divide dimension 0 of .*, which has \d+ elements",
    ):
        Ranks(CASE, pipeline, Layout(tp=3), torch.float32).__enter__()
    from megatron.core import parallel_state

    with pytest.raises(
        ValueError, match="megatron-core was started with {'tp': 3, 'sp': 1}, not tp=1, sp=3"
    ):
        Ranks(CASE, pipeline, Layout(sp=3), torch.float32).__enter__()
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match=r"3\*1 = 3 does not divide the model's 8 attention heads"):
        Ranks(CASE, pipeline, Layout(sp=3), torch.float32).__enter__()
    from megadiff.parallel.linear import layer_config

    axes = SimpleNamespace(tp=1, sequence_parallel=False)
    with (
        patch("importlib.util.find_spec", lambda name: None),
        pytest.raises(ValueError, match="which is not installed"),
    ):
        layer_config(axes, dtype=torch.bfloat16, fp8="tensorwise")


def _result(
    transformer: nn.Module,
    adapter: QwenImageAdapter,
    dtype: torch.dtype,
    samples: slice,
    *,
    backward: bool = True,
) -> dict[str, Tensor]:
    """Both passes of true CFG and log_probs of samples; backward adds the gradient of a sum of all
    to the weights.
    """
    shape = adapter.latents_shape(SAMPLING)
    inputs = draw_inputs(shape, text_dim=TEXT_DIM, dtype=dtype, samples=samples)
    outputs: list[Tensor] = []

    def recorded(**kwargs: object) -> tuple[Tensor]:
        outputs.append(transformer(**kwargs)[0])
        return (outputs[-1],)

    recorded.dtype = dtype
    velocity_BLC = adapter.velocity(
        recorded, inputs.latents_BLC, inputs.sigma_B, inputs.conditioning, SAMPLING
    )
    log_prob_B = inputs.log_probs(velocity_BLC)
    if backward:
        # weighted output sums: their gradient does not pass through float32, as that of log_probs
        # does
        (
            log_prob_B.sum() + sum((output * inputs.weight_BLC).sum() for output in outputs)
        ).backward()
    positive_BLC, negative_BLC = (output.detach() for output in outputs)
    return {"positive": positive_BLC, "negative": negative_BLC, "log_prob": log_prob_B.detach()}


def _random_transformer() -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=NUM_LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            is_norm = p.ndim == 1 and name.endswith(".weight")
            p.copy_(torch.randn_like(p) * (0.05 if p.ndim > 1 else 0.2) + is_norm)
    return transformer


CASE = Case(adapter=QwenImageAdapter, result=_result)
