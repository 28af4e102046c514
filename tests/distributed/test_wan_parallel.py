"""Wan under tensor parallelism, sequence parallelism and Ulysses against the unsharded diffusers
transformer.

45 video tokens, which no number of ranks divides; in one pass the first frame is given, so that
timesteps are per token.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.tiny_models.wan22 import TEXT_DIM, write_tiny_pipeline
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.parallel.tokens import split_tokens, ulysses_axes
from megadiff.types import Sampling
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded_model import (
    FLOOR,
    NUM_SAMPLES,
    TOLERANCES,
    Case,
    Layout,
    Omission,
    check_omissions,
    check_parity,
    draw_inputs,
    patched,
    write_references,
)

SAMPLING = Sampling(height=96, width=160, num_frames=9, num_inference_steps=4, guidance_scale=2.0)
# not 512: among hundreds of equal padding tokens the gradients of single ones drown in rounding
# errors
TEXT_TOKENS = 17
# the default kernel's backward on CPU is off by 1e-5 where gradients of keys cancel, and differs
# with the batch's size
EXACT_ATTENTION = partial(sdpa_kernel, SDPBackend.MATH)
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = TOLERANCES[torch.float32]

LAYOUTS = {
    1: [Layout()],
    2: [
        Layout(tp=2, num_microbatches=2),
        Layout(tp=2, sequence_parallel=False, budget=1),
        Layout(sp=2),
    ],
    4: [
        Layout(tp=4),
        Layout(tp=4, sequence_parallel=False),
        Layout(tp=2, sp=2, budget=0.5),
        Layout(tp=2, sp=2, sequence_parallel=False),
    ],
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "wan"
    write_tiny_pipeline(folder, kind="ti2v_5b")
    transformer = _random_transformer()
    transformer.save_pretrained(folder / "transformer")
    write_references(transformer, CASE, folder, dtypes=[torch.float32])
    return folder


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_the_unsharded_transformer(world_size: int, pipeline: Path) -> None:
    check_parity(CASE, pipeline, LAYOUTS[world_size], [torch.float32], world_size)


class _SummedForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


WITHOUT_SP, WITH_SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2)
OMISSIONS = {
    "sum_in_the_backward_of_across_heads_norms": Omission(
        layout=WITHOUT_SP,
        without=patched("megadiff.parallel.linear.sum_over_group", by=_SummedForwardOnly.apply),
        wrong=("attn1.to_q", "attn1.to_k", "attn2.to_q", "attn2.to_k"),
    ),
    "context_without_sp": Omission(
        layout=WITHOUT_SP,
        without=patched(
            "megadiff.parallel.attention.TokenAxes.enter_context", by=lambda axes, context: context
        ),
        wrong=("text_embedder",),
        only=True,
    ),
    "sum_of_what_is_whole": Omission(
        layout=WITH_SP,
        without=patched("megadiff.parallel.regions.sum_over_tp", by=lambda *args: None),
        wrong=(
            "patch_embedding",
            "time_embedder",
            "time_proj",
            "text_embedder",
            "blocks.0.scale_shift_table",
            "proj_out",
            "blocks.1.norm2",
            "to_out.0.bias",
        ),
    ),
}


def test_each_reduction_is_needed(pipeline: Path) -> None:
    run_ranks(_omission_worker, 2, pipeline)


def _omission_worker(pipeline: Path) -> None:
    check_omissions(CASE, pipeline, OMISSIONS, torch.float32)


@pytest.mark.parametrize("sp", [1, 2])
def test_equals_the_unsharded_transformer_under_veomni(sp: int, pipeline: Path) -> None:
    run_ranks(_veomni_worker, 2, pipeline, sp)


def _veomni_worker(pipeline: Path, sp: int) -> None:
    """The stock module with split tokens, under VeOmni's FSDP2 over dp and sp, with the plan's
    blocks as units.
    """
    from torch.distributed.fsdp import FSDPModule
    from veomni.arguments import MixedPrecisionConfig
    from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

    from megadiff.engines import veomni
    from megadiff.engines.gathering import local
    from megadiff.engines.lora import read_start
    from megadiff.tensors.source_folder import SourceFolder

    mesh = init_mesh(resolve_layout(dp=0, sp=sp, tp=1, dp_replicate=1, world_size=2), "cpu")
    veomni._prepare_library(mesh)
    adapter = WanAdapter(pipeline)
    module = adapter.empty_transformer()
    split_tokens(module, adapter.plan, ulysses_axes(mesh), adapter.attention)
    module.enable_gradient_checkpointing()
    units = {
        type(each).__name__ for name, each in module.named_modules() if adapter.plan.is_block(name)
    }
    module = parallelize_model_fsdp2(
        module,
        mixed_precision=MixedPrecisionConfig(enable=False),
        basic_modules=sorted(units),
        should_skip_hf_weight_load=True,
        init_device="meta",
    ).train()
    assert [name for name, each in module.named_modules() if isinstance(each, FSDPModule)] == [
        "",
        "blocks.0",
        "blocks.1",
    ]
    parameters = dict(module.named_parameters())
    source = SourceFolder(pipeline / "transformer")
    for name, parameter in parameters.items():
        read_start(source, name, [veomni._shard(parameter, local(parameter))], seed=0)

    size = NUM_SAMPLES // mesh.dp
    samples = slice(mesh.dp_rank * size, (mesh.dp_rank + 1) * size)
    reference = load_file(pipeline / "reference_float32.safetensors")
    for name, value in _result(module, adapter, torch.float32, samples).items():
        expected = reference[name][samples]
        assert (value - expected).abs().max() <= OUTPUT_TOLERANCE * expected.abs().max(), name
    floor = FLOOR * max(reference[f"gradient/{name}"].abs().max() for name in parameters)
    for (
        name,
        parameter,
    ) in (
        parameters.items()
    ):  # FSDP2 averages over dp·sp what each rank has of its samples and tokens
        expected = reference[f"gradient/{name}"]
        error = (parameter.grad.full_tensor() * mesh.world_size - expected).abs().max()
        assert error <= GRADIENT_TOLERANCE * max(expected.abs().max(), floor), name


def test_a_replaced_forward_is_refused(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sliced(self, **kwargs: object) -> None:
        """As VeOmni puts its own in diffusers' place."""

    monkeypatch.setattr(WanTransformer3DModel, "forward", sliced)
    adapter = WanAdapter(pipeline)
    with pytest.raises(
        ValueError, match="WanTransformer3DModel.forward is no longer diffusers' own but tests"
    ):
        split_tokens(
            adapter.empty_transformer(), adapter.plan, axes=None, attention=adapter.attention
        )


def _result(
    transformer: nn.Module,
    adapter: WanAdapter,
    dtype: torch.dtype,
    samples: slice,
    *,
    backward: bool = True,
) -> dict[str, Tensor]:
    """Velocities with guidance, of a whole video and of all frames but a given first; log_probs of
    the first.
    """
    inputs = draw_inputs(
        adapter.latents_shape(SAMPLING), text_dim=TEXT_DIM, dtype=dtype, samples=samples
    )
    latents_BLC, sigma_B = inputs.latents_BLC, inputs.sigma_B
    num_first = adapter.grid(SAMPLING).tokens_per_frame
    with_first = inputs.conditioning | {"image_latents": latents_BLC[:, :num_first]}
    with (
        patch("megadiff.models.wan22.text.TEXT_TOKENS", TEXT_TOKENS),
        EXACT_ATTENTION(),
    ):  # recomputation included
        velocity_BLC = adapter.velocity(
            transformer, latents_BLC, sigma_B, inputs.conditioning, SAMPLING
        )
        given_BLC = adapter.velocity(
            transformer, latents_BLC[:, num_first:], sigma_B, with_first, SAMPLING
        )
        log_prob_B = inputs.log_probs(velocity_BLC)
        if backward:
            outputs = (velocity_BLC * inputs.weight_BLC).sum() + (
                given_BLC * inputs.weight_BLC[:, num_first:]
            ).sum()
            (log_prob_B.sum() + outputs).backward()
    return {
        "velocity": velocity_BLC.detach(),
        "given": given_BLC.detach(),
        "log_prob": log_prob_B.detach(),
    }


def _random_transformer() -> WanTransformer3DModel:
    """Of which every part matters."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=48,
        out_channels=48,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=64,
    )
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            is_norm = p.ndim == 1 and "norm" in name and name.endswith(".weight")
            p.copy_(torch.randn_like(p) * (0.1 if p.ndim > 1 else 0.2) + is_norm)
        for block in (
            transformer.blocks
        ):  # sharp attention: in a mean of all texts the gradients of keys cancel
            block.attn2.norm_q.weight.mul_(2)
            block.attn2.norm_k.weight.mul_(2)
    return transformer


CASE = Case(adapter=WanAdapter, result=_result)
