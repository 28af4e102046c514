"""Make the most of blocks that vllm-omni compiles: kernels for fixed sizes, rotations that fuse.

vllm-omni compiles them for any size. With fixed sizes, and rows read once where they fit, norms and
activations take a third to two thirds of the time (docs/performance.md). The text's length stays
free, as it differs from call to call. Tested with vllm-omni 0.26 and torch 2.11.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._dynamo import mark_static
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch.utils._pytree import tree_leaves
from vllm_omni.diffusion.layers.rope import RotaryEmbedding

from megadiff.models.adapter import STREAMS
from megadiff.models.rotary import rotate_pairs
from megadiff.process.variants import with_own_variants

IMAGE, TEXT = STREAMS
ORIGINAL = "_torchdynamo_orig_callable"  # of a compiled function, by torch
# Sizes of calls that get kernels of their own: a run's, those of its gate and its evaluations.
FIXED_SIZES = 4
# Of a row that is normalised, in numbers. Rows of a head are shorter, a GPU takes many at once.
LONG_ROWS = range(257, 4097)
_stock_choice = InductorChoices.should_use_persistent_reduction
_is_in_block = False  # whether what is compiled now is a block's


def tune_blocks(model: nn.Module, *, num_rows: Callable[[], int]) -> None:
    """Prepare a transformer on a GPU, compiled by vllm-omni and not called yet.

    num_rows: samples of the rollout call that runs, 0 for any other.
    """
    choices: Any = InductorChoices
    choices.should_use_persistent_reduction = staticmethod(_reads_rows_once)
    fuse_rotary(model)
    fix_sizes(model, num_rows=num_rows)


def fuse_rotary(model: nn.Module) -> None:
    """Let rotary layers of neighbouring pairs compute in plain torch; no others.

    vllm-omni calls a kernel for each, with a read and a write more of all queries and keys.
    """
    for layer in model.modules():
        # Subclasses take other tables, and say so in a forward of their own.
        if type(layer) is RotaryEmbedding and layer.interleaved:
            layer._forward_method = _rotate  # type: ignore[assignment]  # a CustomOp's attribute


def fix_sizes(model: nn.Module, *, num_rows: Callable[[], int]) -> None:
    """Let blocks be compiled for the sizes of whole rollout calls, the first FIXED_SIZES of them.

    A size is the number of rows and, where a block takes text apart from image, of image tokens.
    All other sizes share kernels for any: of OpenAI requests, and of samples that still share their
    noise.
    """
    sizes: set[tuple[int, ...]] = set()
    for block in model.modules():
        is_block = type(block).__name__ in getattr(model, "_repeated_blocks", ())
        # vllm-omni goes on with blocks that torch could not compile
        if is_block and hasattr(block.forward, ORIGINAL):
            block.forward = _choosing(block.forward, sizes, num_rows)


def _choosing(
    any_size: Callable[..., Any], sizes: set[tuple[int, ...]], num_rows: Callable[[], int]
) -> Callable[..., Any]:
    """Return a forward that takes any_size, a block's compiled one, where no size is fixed.

    sizes: that are fixed, of all blocks; filled here.
    """
    fixed = torch.compile(with_own_variants(getattr(any_size, ORIGINAL)), dynamic=True)
    signature = inspect.signature(any_size)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        tensors = _tensors(arguments)
        image = arguments.get(IMAGE, tensors[0])
        # SD3.5's comes in a tuple, as its embedding returns it
        text = next(iter(_tensors(arguments.get(TEXT))), None)
        size = tuple(image.shape[:1] if text is None else image.shape[:2])

        if len(sizes) < FIXED_SIZES and len(image) == num_rows():
            sizes.add(size)
        if size not in sizes:
            return any_size(*args, **kwargs)

        for tensor in tensors:
            mark_static(tensor, list(_fixed_dims(tensor, image=image, text=text)))
        with _compiling_blocks():
            return fixed(*args, **kwargs)

    return forward


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _fixed_dims(tensor: Tensor, *, image: Tensor, text: Tensor | None) -> Iterator[int]:
    """Yield a block's dimensions that do not change with the text's length."""
    if text is None:  # it is somewhere in the image's stream
        if tensor.ndim > 0 and len(tensor) == len(image):
            yield 0
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


@contextmanager
def _compiling_blocks() -> Iterator[None]:
    global _is_in_block
    _is_in_block = True
    try:
        yield
    finally:
        _is_in_block = False


def _reads_rows_once(features: Any, cooperative_reduction: bool) -> bool:
    """Decide for torch whether a kernel keeps a row that it reduces, or reads it twice.

    By rule and not by timing both, as torch's `multi_kernel` does: replicas of a run must round
    alike. features: of the kernel.
    """
    size = features.reduction_numel
    is_row = features.get_reduction_hint() == ReductionHint.INNER
    if _is_in_block and is_row and not cooperative_reduction and isinstance(size, sympy.Integer):
        return int(size) in LONG_ROWS
    return _stock_choice(features, cooperative_reduction)
