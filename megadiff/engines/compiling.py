"""torch.compile of a transformer's blocks, in as few variants as their inputs allow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic

from megadiff.models.adapter import STREAMS
from megadiff.parallel.plan import ParallelPlan

VARIANTS = 32
IMAGE, TEXT = STREAMS


def compile_blocks(
    model: nn.Module, plan: ParallelPlan, *, text_varies: bool, budget: float
) -> None:
    """Each block's forward, the same code for all blocks of a kind. Hooks stay around it.

    budget: share of its activations that a block keeps for its backward: of what takes longest to compute for its bytes, by
    torch's own choice; 0 keeps its inputs. One for all of the process. Without the second product of an MLP, a third of a
    block's work and a fifteenth of its activations, a block of Qwen-Image computes 4.0 forwards in all, with it 3.75.
    text_varies: the text's length is of any size from the first variant on; else, and by torch's own rule, a second
    length compiles everything again. torch keeps 8 variants of a function and runs what comes after them uncompiled, with
    a warning only. Here there are up to 32: with and without gradient, text mask and adapter; the last block; a
    microbatch that is not full.
    """
    torch._functorch.config.activation_memory_budget = budget
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for name, module in model.named_modules():
        if plan.is_block(name):
            signature, compiled = inspect.signature(module.forward), torch.compile(module.forward)
            module.forward = _of_any_text_length(compiled, signature) if text_varies else compiled


def _of_any_text_length(
    compiled: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        _mark(signature.bind(*args, **kwargs).arguments)
        return compiled(*args, **kwargs)

    return forward


def _mark(arguments: dict[str, Any]) -> None:
    """Every dimension of the text's length in the streams' embeddings, masks and rotations, and of both streams' length in
    masks of their joint attention. Not where such a length is some other size of the image's stream as well: torch would
    then take the two for one. The last dimension of all but masks is one of features, whatever its size."""
    image, text = arguments[IMAGE].shape, arguments[TEXT].shape[1]
    lengths = {text, text + image[1]}.difference(image)
    for tensor in _tensors(value for name, value in arguments.items() if name != IMAGE):
        for dim, size in enumerate(
            tensor.shape if tensor.dtype == torch.bool else tensor.shape[:-1]
        ):
            if size in lengths:
                maybe_mark_dynamic(tensor, dim)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
