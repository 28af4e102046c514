"""A small transformer of each family, of which every part matters, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import (
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.tiny_models.bagel import write_tiny_bagel
from examples.tiny_models.wan22 import write_tiny_pipeline as write_tiny_wan
from megadiff.models.adapter import ModelAdapter
from megadiff.models.bagel.adapter import BagelAdapter
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.qwen_image_edit.adapter import QwenImageEditAdapter
from megadiff.models.sd3.adapter import SD3Adapter
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.image_to_video import WanImageToVideoAdapter
from megadiff.models.z_image.adapter import ZImageAdapter
from megadiff.types import Sampling
from tests.distributed.sharded_model import NUM_SAMPLES, Case, draw_inputs
from tests.plain_module import plain_module

TEXT_DIM = 24
FLOAT32 = (torch.float32,)
EXACT = (torch.float64, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the table of layouts needs of a family.

    write: makes the folder and returns the unsharded transformer.
    text_lengths, negative_lengths: of each sample's texts, where the model takes several.
    patches: dotted name → value, for texts of fewer tokens: among hundreds of equal padding tokens
    the gradients of single ones drown in rounding.
    head_norms, outside, stream: parts of names of weights whose gradient must be wrong without the
    sum over tp without sequence parallelism and with it, and without the sum over sp.
    dtypes: in which outputs and gradients are compared; some modules turn in float32 always.
    """

    adapter: Callable[[Path], ModelAdapter]
    write: Callable[[Path], nn.Module]
    sampling: Sampling
    outside: tuple[str, ...]
    stream: tuple[str, ...]
    head_norms: tuple[str, ...] = ()
    text_lengths: tuple[int, ...] = (9, 6, 7, 5)
    negative_lengths: tuple[int, ...] = (3, 3, 3, 3)
    patches: Mapping[str, object] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOAT32


def case_of(name: str) -> Case:
    return Case(adapter=FAMILIES[name].adapter, result=partial(_result, name))


def _result(
    name: str,
    transformer: nn.Module,
    adapter: ModelAdapter,
    dtype: torch.dtype,
    samples: slice,
    *,
    backward: bool = True,
) -> dict[str, Tensor]:
    """The guided velocity and log_probs of samples; backward adds the gradient of a sum of all."""
    family = FAMILIES[name]
    shape = adapter.latents_shape(family.sampling)
    inputs = draw_inputs(shape, dtype=dtype, samples=samples)
    with ExitStack() as stack:
        for target, value in family.patches.items():
            stack.enter_context(patch(target, value))
        # the default kernel's backward on CPU is off by 1e-5 where gradients of keys cancel, and
        # differs with the batch's size
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        conditioning = {
            key: value[samples].to(dtype) if value.is_floating_point() else value[samples]
            for key, value in _conditioning(family, adapter).items()
        }
        velocity_BLC = adapter.velocity(
            transformer, inputs.latents_BLC, inputs.sigma_B, conditioning, family.sampling
        )
        log_prob_B = inputs.log_probs(velocity_BLC)
        if backward:
            (log_prob_B.sum() + (velocity_BLC * inputs.weight_BLC).sum()).backward()
    return {"velocity": velocity_BLC.detach(), "log_prob": log_prob_B.detach()}


def _conditioning(family: Family, adapter: ModelAdapter) -> dict[str, Tensor]:
    """Draw texts of the family's lengths, and given images, of all samples in float64."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64)

    conditioning = {}
    for prefix, lengths in (("", family.text_lengths), ("negative_", family.negative_lengths)):
        for name, blank in adapter.blank_text(max(lengths)).items():
            shape = blank.shape[1:]
            if blank.dtype == torch.bool:
                value = torch.arange(*shape) < torch.tensor(lengths)[:, None]
            elif blank.is_floating_point():
                value = draw(*shape)
            else:
                value = torch.randint(0, 256, (NUM_SAMPLES, *shape), generator=generator)
            conditioning[prefix + name] = value
    if family.sampling.images:
        conditioning[IMAGE_LATENTS] = draw(*adapter.image_latents_shape(family.sampling))
    return conditioning


def _randomise(transformer: nn.Module, scale: float, *, norms: str = "") -> None:
    """Draw all weights. Norms are about 1. norms: in the names of norms.

    scale: of matrices. Larger ones amplify rounding; smaller ones leave keys' biases a gradient
    that is rounding alone.
    """
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            is_norm = p.ndim == 1 and norms in name and name.endswith(".weight")
            p.copy_(torch.randn_like(p) * (scale if p.ndim > 1 else 0.2) + is_norm)


def _saved(transformer: nn.Module, *folders: Path) -> nn.Module:
    for folder in folders:
        transformer.save_pretrained(folder)  # type: ignore[operator]  # diffusers' ModelMixin
    return transformer


def _write_sd3(folder: Path) -> nn.Module:
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
        pooled_projection_dim=20,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    _randomise(transformer, 0.12)
    return _saved(transformer, folder / "transformer")


def _write_z_image(folder: Path) -> nn.Module:
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
    # with 0.08 two microbatches of the unsharded module differ from one batch by 5.7e-6 already
    _randomise(transformer, 0.06)
    return _saved(transformer, folder / "transformer")


def _write_qwen(folder: Path, *, zero_cond_t: bool = False) -> nn.Module:
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
        zero_cond_t=zero_cond_t,
    )
    _randomise(transformer, 0.05)
    return _saved(transformer, folder / "transformer")


def _write_wan(folder: Path, *, kind: str, **sizes: Any) -> nn.Module:
    write_tiny_wan(folder, kind=kind)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=64,
        **sizes,
    )
    _randomise(transformer, 0.15, norms="norm")
    with torch.no_grad():
        # sharp attention: in a mean of all texts the gradients of keys cancel
        for block in transformer.blocks:
            block.attn2.norm_q.weight.mul_(2)
            block.attn2.norm_k.weight.mul_(2)
    experts = [path for path in folder.glob("transformer*") if path.is_dir()]
    return _saved(transformer, *experts)


def _write_bagel(folder: Path) -> nn.Module:
    write_tiny_bagel(folder)
    return plain_module(BagelAdapter(folder))


IMAGE = Sampling(height=48, width=80, num_inference_steps=4, guidance_scale=2.0)
# 15 drawn tokens and 7 of two given images, so that no rank's chunk begins or ends with an image
EDIT = Sampling(
    height=48, width=80, images=((32, 48), (16, 16)), num_inference_steps=4, true_cfg_scale=2.0
)
# of several numbers of tokens none is divided by any number of ranks
VIDEO = Sampling(height=48, width=80, num_frames=9, num_inference_steps=4, guidance_scale=2.0)
WAN = {
    "outside": (
        "patch_embedding",
        "time_embedder",
        "time_proj",
        "text_embedder",
        "blocks.0.scale_shift_table",
        "proj_out",
        "blocks.1.norm2",
        "to_out.0.bias",
    ),
    "stream": ("patch_embedding", "blocks.0", "proj_out"),
    "patches": {"megadiff.models.wan22.text.TEXT_TOKENS": 17},
    "text_lengths": (17, 12, 15, 16),
    "negative_lengths": (14, 17, 13, 17),
}
QWEN = {
    "outside": ("img_in", "txt_in", "txt_norm", "time_text_embed", "norm_out", "proj_out"),
    "stream": ("img_in", "proj_out", "transformer_blocks", "img_mod"),
    "head_norms": ("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
}
FAMILIES = {
    # Some blocks attend to the image twice. The stock forward makes tokens of [B, C, H, W] itself.
    "sd35": Family(
        adapter=SD3Adapter,
        write=_write_sd3,
        sampling=replace(IMAGE, height=64, width=48),
        patches={"megadiff.models.sd3.adapter.SD3Adapter.text_tokens": 6},
        dtypes=EXACT,
        head_norms=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        outside=("pos_embed.proj", "context_embedder", "time_text_embed", "norm_out", "proj_out"),
        stream=("pos_embed.proj", "attn2", "transformer_blocks.0", "proj_out"),
    ),
    # Texts fill up to different multiples of 32, so that rows have masks and positions of their
    # own; 15 image tokens are filled up to 32.
    "z_image": Family(
        adapter=ZImageAdapter,
        write=_write_z_image,
        sampling=IMAGE,
        text_lengths=(9, 40, 33, 5),
        head_norms=("norm_q", "norm_k"),
        outside=(
            "x_pad_token",
            "cap_pad_token",
            "all_x_embedder",
            "cap_embedder",
            "noise_refiner",
            "context_refiner",
            "t_embedder",
            "all_final_layer",
        ),
        stream=("x_pad_token", "context_refiner", "layers.0", "all_final_layer"),
    ),
    "qwen_image": Family(
        adapter=QwenImageAdapter,
        write=_write_qwen,
        sampling=replace(EDIT, images=()),
        dtypes=EXACT,
        **QWEN,
    ),
    "edit_2509": Family(
        adapter=QwenImageEditAdapter,
        write=_write_qwen,
        sampling=EDIT,
        **QWEN,
    ),
    # its given images are modulated at time 0
    "edit_2511": Family(
        adapter=QwenImageEditAdapter,
        write=partial(_write_qwen, zero_cond_t=True),
        sampling=EDIT,
        **QWEN,
    ),
    "wan21_t2v": Family(
        adapter=WanAdapter,
        write=partial(_write_wan, kind="t2v_1_3b", in_channels=16, out_channels=16),
        sampling=VIDEO,
        **WAN,
    ),
    # the first frame is given, so that timesteps are of single tokens
    "wan22_ti2v": Family(
        adapter=WanAdapter,
        write=partial(_write_wan, kind="ti2v_5b", in_channels=48, out_channels=48),
        sampling=replace(VIDEO, height=96, width=160, images=((96, 160),)),
        **WAN,
    ),
    "wan22_i2v": Family(
        adapter=WanImageToVideoAdapter,
        write=partial(_write_wan, kind="i2v_a14b", in_channels=36, out_channels=16),
        sampling=replace(VIDEO, images=((48, 80),)),
        **WAN,
    ),
    # two texts are blank, the branch without a prompt
    "bagel": Family(
        adapter=BagelAdapter,
        write=_write_bagel,
        sampling=IMAGE,
        text_lengths=(7, 9, 6, 8),
        negative_lengths=(2, 2, 5, 2),
        head_norms=("q_norm_moe_gen", "k_norm_moe_gen"),
        outside=("input_layernorm_moe_gen"),
        stream=("mlp_moe_gen", "norm_moe_gen"),
    ),
}
