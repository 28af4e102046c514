"""Qwen-Image-Edit under tensor parallelism, sequence parallelism and Ulysses against the unsharded
diffusers transformer, on gloo processes.

It is 2511's kind, whose given images are modulated at time 0: in 15 drawn tokens and 7 of two given
images no rank's chunk begins or ends with an image. 2509's kind differs in leaving that out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.qwen_image_edit.adapter import QwenImageEditAdapter
from megadiff.types import Sampling
from tests.distributed.sharded_model import (
    NUM_SAMPLES,
    Case,
    Layout,
    check_parity,
    draw_inputs,
    write_references,
)

TEXT_DIM = 24
SAMPLING = Sampling(
    height=48,
    width=80,
    images=((32, 48), (16, 16)),
    num_inference_steps=4,
    true_cfg_scale=2.0,
)
LAYOUTS = [
    Layout(tp=2, num_microbatches=2),
    Layout(tp=2, sequence_parallel=False, budget=0.5),
    Layout(sp=2),
    Layout(num_microbatches=2),  # dp 2
]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=True,
    )
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            is_norm = p.ndim == 1 and name.endswith(".weight")
            p.copy_(torch.randn_like(p) * (0.05 if p.ndim > 1 else 0.2) + is_norm)
    transformer.save_pretrained(folder / "transformer")
    write_references(transformer, CASE, folder, dtypes=[torch.float32])
    return folder


def test_equals_the_unsharded_transformer(pipeline: Path) -> None:
    check_parity(CASE, pipeline, LAYOUTS, [torch.float32], 2)


def test_equals_it_where_both_axes_are_split(pipeline: Path) -> None:
    check_parity(CASE, pipeline, [Layout(tp=2, sp=2)], [torch.float32], 4)


def _result(
    transformer: nn.Module,
    adapter: QwenImageEditAdapter,
    dtype: torch.dtype,
    samples: slice,
    *,
    backward: bool = True,
) -> dict[str, Tensor]:
    """Both passes of true CFG and log_probs of samples."""
    shape = adapter.latents_shape(SAMPLING)
    inputs = draw_inputs(shape, text_dim=TEXT_DIM, dtype=dtype, samples=samples)
    generator = torch.Generator().manual_seed(2)
    given_BLC = torch.randn(NUM_SAMPLES, 7, shape[1], generator=generator)
    conditioning = {**inputs.conditioning, IMAGE_LATENTS: given_BLC[samples]}
    outputs: list[Tensor] = []

    def recorded(**kwargs: object) -> tuple[Tensor]:
        (output_BLC,) = transformer(**kwargs)
        outputs.append(output_BLC[:, : shape[0]].contiguous())
        return (output_BLC,)

    recorded.dtype = dtype
    velocity_BLC = adapter.velocity(
        recorded, inputs.latents_BLC, inputs.sigma_B, conditioning, SAMPLING
    )
    log_prob_B = inputs.log_probs(velocity_BLC)
    if backward:
        weighted = sum((output * inputs.weight_BLC).sum() for output in outputs)
        (log_prob_B.sum() + weighted).backward()
    positive_BLC, negative_BLC = (output.detach() for output in outputs)
    return {"positive": positive_BLC, "negative": negative_BLC, "log_prob": log_prob_B.detach()}


CASE = Case(adapter=QwenImageEditAdapter, result=_result)
