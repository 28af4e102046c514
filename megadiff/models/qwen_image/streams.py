"""Keep Qwen-Image's residual streams in float32, with matrix products in bfloat16.

Trainer and replica never round at the same points: their kernels add up in other orders. Most of
the difference in velocity comes from rounding the streams, two sums in each of 60 blocks, and from
rounding the velocity itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.models.adapter import STREAMS


def keep_streams_in_float32(transformer: Any, dtype: torch.dtype) -> None:
    """Make the transformer's streams float32, in place, before or after its weights are there.

    transformer: of diffusers' class, VeOmni's or vllm-omni's. dtype: of the matrix products.
    Blocks add to float32 streams. Norms and modulations are rounded once, where attention and MLPs
    take them. The output layers compute in float32 and the velocity is float32.
    """
    blocks = transformer.transformer_blocks
    # the first block's input is enough: residual sums on it are float32, and so is what it hands on
    blocks[0].register_forward_pre_hook(partial(_cast, torch.float32), with_kwargs=True)
    products = [module for block in blocks for module in (block.attn, block.img_mlp, block.txt_mlp)]
    products.append(transformer.img_in)  # a scheduler gives latents the velocity's dtype
    for module in products:
        module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)

    transformer.norm_out.forward = partial(_norm, transformer.norm_out)
    transformer.proj_out.forward = partial(_project, transformer.proj_out)


def _cast(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast both streams, which are the first two arguments, or the one that an MLP takes."""
    streams = tuple(stream_BSC.to(dtype) for stream_BSC in args[:2])
    named = {name: kwargs[name].to(dtype) for name in STREAMS if name in kwargs}
    return (*streams, *args[2:]), {**kwargs, **named}


def _norm(norm_out: Any, stream_BSC: Tensor, embedding_BC: Tensor) -> Tensor:
    """Compute diffusers' AdaLayerNormContinuous in float32 from the linear layer's output on."""
    scale_BC, shift_BC = norm_out.linear(norm_out.silu(embedding_BC)).float().chunk(2, dim=1)
    return norm_out.norm(stream_BSC.float()) * (1 + scale_BC)[:, None] + shift_BC[:, None]


def _project(proj_out: nn.Linear, stream_BSC: Tensor) -> Tensor:
    return functional.linear(stream_BSC, proj_out.weight.float(), proj_out.bias.float())
