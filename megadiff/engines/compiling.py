"""torch.compile of a transformer's blocks, in as few variants as their inputs allow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.utils._pytree import tree_leaves

from megadiff.models.adapter import STREAMS
from megadiff.models.joint_attention import WholeStreams
from megadiff.parallel.plan import ParallelPlan
from megadiff.process.variants import with_own_variants

VARIANTS = 32
IMAGE, TEXT = STREAMS


def compile_blocks(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    microbatch_size: int,
    budget: float,
    in_one_graph: bool = False,
) -> None:
    """Compile each block's forward, the same code for all blocks of a kind. Hooks stay around it.

    budget: fraction of its activations that a block keeps for its backward, by torch's own choice
    those that take longest to compute for their bytes; 0 keeps its inputs. One for all of the
    process. The second product of an MLP is a third of a block's work and a fifteenth of its
    activations: with it a block of Qwen-Image computes 3.75 forwards in all, without it 4.0.
    microbatch_size: of most calls, which get variants of their own, in a list of their own. Once
    torch has seen another number of rows, as the gate's, it would compile all that follows for any
    number, and those kernels are slower. All other numbers share such variants.
    Where text is a stream of its own, any length fits from the first variant on. Else, by torch's
    own rule, a second length compiles everything again.
    in_one_graph: torch raises an error where something would cut a block into several graphs, which
    choose their activations each by itself.
    """
    torch._functorch.config.activation_memory_budget = budget
    # It launches kernels without letting go of Python's lock (torch 2.11). Behind a collective that
    # never ends the queue fills up, a launch waits, and with it the thread that saves. Triton's is
    # no slower: 1.767 and 1.763 s an update (15 blocks, 64 rows, H200).
    torch._inductor.config.use_static_cuda_launcher = False
    # torch keeps 8 variants of a function and runs later ones uncompiled, with a warning only; here
    # are more: with and without gradient, text mask and LoRA, the last block, a smaller microbatch
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for name, module in model.named_modules():
        if plan.is_block(name):
            module.forward = _choosing(
                module.forward,
                microbatch_size=microbatch_size,
                text_varies=plan.num_streams > 1,
                in_one_graph=in_one_graph,
            )


def _choosing(
    forward: Callable[..., Any], *, microbatch_size: int, text_varies: bool, in_one_graph: bool
) -> Callable[..., Any]:
    """Return the forward compiled: for whole microbatches, and apart from that for other sizes."""
    signature = inspect.signature(forward)
    whole = torch.compile(with_own_variants(forward), fullgraph=in_one_graph)
    any_size = torch.compile(forward, fullgraph=in_one_graph)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if text_varies:
            _mark_text(arguments)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        num_rows = len(arguments.get(IMAGE, tensors[0]))
        if num_rows == microbatch_size:
            return whole(*args, **kwargs)

        for tensor in tensors:
            if tensor.ndim > 1 and len(tensor) == num_rows:
                maybe_mark_dynamic(tensor, 0)
        return any_size(*args, **kwargs)

    return compiled


def _mark_text(arguments: dict[str, Any]) -> None:
    """Mark dimensions of the text's length as dynamic, and of both streams' in joint masks.

    They are in the streams' embeddings, masks and rotations. Where tokens are split, the whole
    streams say where theirs are.
    """
    image_shape = arguments[IMAGE].shape
    text_length = arguments[TEXT].shape[1]
    # torch would take a length for the image stream's size where the two are equal
    lengths = {text_length, text_length + image_shape[1]}.difference(image_shape)
    for tensor in tree_leaves([value for name, value in arguments.items() if name != IMAGE]):
        if isinstance(tensor, WholeStreams):
            for whole, dim in tensor.text_dims():
                maybe_mark_dynamic(whole, dim)
        if not isinstance(tensor, Tensor):
            continue
        # the last dimension of all but masks is one of features, whatever its size
        sizes = tensor.shape if tensor.dtype == torch.bool else tensor.shape[:-1]
        for dim, size in enumerate(sizes):
            if size in lengths:
                maybe_mark_dynamic(tensor, dim)
