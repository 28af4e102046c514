"""Make the most of blocks that vllm-omni compiles: kernels for fixed sizes, rotations that fuse.

vllm-omni compiles them for any size. Of 16 rows of 512² an H200 then takes 230 µs for a modulated
norm, with fixed sizes 128, and 63 where torch may choose how to reduce. The text's length stays
free, as it differs from call to call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo import mark_static
from torch.utils._pytree import tree_leaves
from vllm_omni.diffusion.layers.rope import RotaryEmbedding

from megadiff.models.adapter import STREAMS
from megadiff.models.rotary import rotate_pairs

IMAGE, TEXT = STREAMS
# Sizes of calls that get kernels of their own: a run's, and those of its gate.
FIXED_SIZES = 4


def tune_blocks(model: nn.Module) -> None:
    """Prepare a transformer on a GPU, compiled by vllm-omni and not called yet."""
    # torch then measures two forms of each reduction
    torch._inductor.config.triton.multi_kernel = 1
    fuse_rotary(model)
    fix_sizes(model)


def fuse_rotary(model: nn.Module) -> None:
    """Let rotary layers of neighbouring pairs compute in plain torch; no others.

    vllm-omni calls a kernel of its own for each, which reads and writes all of them once more.
    """
    for layer in model.modules():
        # Subclasses take other tables, and say so in a forward of their own.
        if type(layer) is RotaryEmbedding and layer.interleaved:
            layer._forward_method = _rotate  # type: ignore[assignment]  # a CustomOp's attribute


def fix_sizes(model: nn.Module) -> None:
    """Let blocks be compiled for the sizes of the first calls, FIXED_SIZES of them.

    A size is the number of rows and, where a block takes text apart from image, of image tokens.
    All other sizes share kernels for any.
    """
    sizes: set[tuple[int, ...]] = set()
    for block in model.modules():
        if type(block).__name__ in getattr(model, "_repeated_blocks", ()):
            block.forward = _marking(block.forward, sizes)


def _marking(compiled: Callable[..., Any], sizes: set[tuple[int, ...]]) -> Callable[..., Any]:
    """Return a block's compiled forward that marks what is fixed. sizes: all blocks', kept."""
    signature = inspect.signature(compiled)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        tensors = _tensors(arguments)
        image = arguments.get(IMAGE, tensors[0])
        # SD3.5's comes in a tuple, as its embedding returns it
        text = next(iter(_tensors(arguments.get(TEXT))), None)
        size = tuple(image.shape[:1] if text is None else image.shape[:2])

        if size in sizes or len(sizes) < FIXED_SIZES:
            sizes.add(size)
            for tensor in tensors:
                mark_static(tensor, list(_fixed_dims(tensor, image=image, text=text)))
        return compiled(*args, **kwargs)

    return forward


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _fixed_dims(tensor: Tensor, *, image: Tensor, text: Tensor | None) -> Iterator[int]:
    """Yield a block's dimensions that do not change with the text's length."""
    if text is None:  # it is somewhere in the image's stream
        yield from range(int(tensor.ndim > 0 and len(tensor) == len(image)))
        return
    lengths = {text.shape[1], text.shape[1] + image.shape[1]}
    for dim, size in enumerate(tensor.shape):
        is_length = dim == 1 if tensor is text else size in lengths
        if tensor is image or not is_length:
            yield dim


def _rotate(x_BTHD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate as vllm-omni's RotaryEmbedding: of tables [B, T, P] the first row holds for all."""
    tables = [table[0] if table.ndim == 3 else table for table in (cos_TP, sin_TP)]
    return rotate_pairs(x_BTHD, *tables)
