"""Measure what autograd saves of one forward of a transformer, on fake tensors without memory.

Saved bytes are linear in blocks, tokens and rows. So small forwards of one and of two blocks of the
real width give the bytes of any plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from megadiff.models.adapter import ModelAdapter
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.decoding import TokenCount
from megadiff.parallel.lora import Adapters, adapt_linears
from megadiff.parallel.plan import LINEAR_KINDS, LORA_A, ParallelPlan
from megadiff.parallel.recompute import recompute_blocks
from megadiff.types import LoraSpec, Sampling

TOKENWISE = "tokenwise"
INPUTS = "inputs"
HEADS = "heads"
KINDS = (TOKENWISE, INPUTS, HEADS)
ROWS = 2  # of a forward; with one, what is a copy for several would be a view
WIDTH = 256  # pixels, of both sizes below
HEIGHTS = (256, 512)  # the difference of two sizes is what image tokens take
TEXT_TOKENS = 64  # of a family that pads no texts
VIDEO_FRAMES = 9  # only of a video a token has a timestep of its own


@dataclass(frozen=True, kw_only=True)
class SavedRow:
    """Hold the bytes of one row by kind, as a single GPU has them.

    tokenwise: norms and modulations, which split tokens divide. inputs: what attention, MLPs and
    LoRA's inner products read, of all tokens of a tensor-parallel group. heads: the inside of
    attention and MLPs, which tensor parallelism divides.
    image_token: bytes of one image token. text: bytes of all else, almost only of the text_tokens
    that the row had.
    unread_bytes: of frozen weights that the backward does not read, as no gradient passes to their
    inputs; the same for any number of rows.
    """

    image_token: dict[str, float]
    text: dict[str, float]
    text_tokens: int
    unread_bytes: int

    def less(self, other: SavedRow) -> SavedRow:
        """Return the difference of two rows, with the weights of the first."""
        return replace(
            self,
            image_token={kind: self.image_token[kind] - other.image_token[kind] for kind in KINDS},
            text={kind: self.text[kind] - other.text[kind] for kind in KINDS},
        )


@dataclass(frozen=True, kw_only=True)
class SavedModules:
    """Hold what each block saves, without its weights, and what all modules outside them save."""

    blocks: tuple[SavedRow, ...]
    outside: SavedRow


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Hold what a transformer saves whose blocks keep all, and one whose blocks are recomputed.

    A recomputed block saves its inputs. What several blocks get is counted outside.
    norm_itemsize: bytes of a number in norms and residual sums.
    """

    whole: SavedModules
    recomputed: SavedModules
    norm_itemsize: int


@dataclass(kw_only=True)
class BlockRecorder:
    """Collect the storages that autograd saves, each with the kind of where it was saved first.

    Tensors stay alive in here, so that no storage's key comes twice.
    """

    half_head: int
    kind: str = TOKENWISE
    inputs: dict[int, Tensor] = field(default_factory=dict)
    tensors: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor, as the hook of saved_tensors_hooks."""
        # tables of rotary angles, the same for all rows: complex, or cosines [..., 1, D / 2]
        is_table = tensor.is_complex() or tensor.shape[-2:] == (1, self.half_head)
        if not is_table:
            self.tensors.setdefault(_key(tensor), (self.kind, tensor))
        return tensor

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begin an attention or an MLP, as a forward pre-hook."""
        self.kind = HEADS
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.inputs[_key(value)] = value

    def leave(self, module: nn.Module, args: tuple, output: object) -> None:
        """End an attention or an MLP, as a forward hook."""
        self.kind = TOKENWISE

    def multiplied(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Record LoRA's inner product, which every tensor-parallel rank has whole."""
        self.inputs[_key(output)] = output

    def bytes_by_kind(self, weights: set[int]) -> list[int]:
        """Return the bytes of KINDS without the weights, whose keys are given."""
        totals = dict.fromkeys(KINDS, 0)
        for key, (kind, tensor) in self.tensors.items():
            if key not in weights:
                totals[INPUTS if key in self.inputs else kind] += tensor.untyped_storage().nbytes()
        return list(totals.values())

    def norm_itemsize(self, width: int) -> int:
        """Return the largest item of the tokenwise tensors [..., width]."""
        sizes = [
            tensor.itemsize
            for kind, tensor in self.tensors.values()
            if kind == TOKENWISE and tensor.shape[-1] == width
        ]
        return max(sizes)


@cache
def measure(
    adapter: ModelAdapter,
    *,
    lora: LoraSpec | None,
    dtype: torch.dtype,
    float32_streams: bool,
    modulates_tokens: bool,
) -> Saved:
    """Return what the family's stock transformer in dtype saves, uncompiled."""
    transformer = adapter.empty_transformer()
    frozen = adapter.plan.frozen_names([name for name, _ in transformer.named_parameters()])
    for name in frozen:
        transformer.get_parameter(name).requires_grad = False
    if lora:
        adapt_linears(transformer, Adapters(lora))
    if float32_streams:
        adapter.keep_streams_in_float32(transformer, dtype)

    # of videos only those that begin with a given image modulate tokens
    has_image = modulates_tokens or adapter.needs_images
    samplings = [
        Sampling(
            height=height,
            width=WIDTH,
            num_frames=VIDEO_FRAMES if modulates_tokens else 1,
            images=((height, WIDTH),) if has_image else (),
            num_inference_steps=1,
        )
        for height in HEIGHTS
    ]

    recorder = BlockRecorder(half_head=adapter.width // adapter.num_heads // 2)
    _watch(transformer, adapter, recorder)
    _fill(transformer, dtype)

    def row(budget: float, *blocks: nn.Module) -> SavedRow:
        """Return what one row saves with the blocks that are left. blocks: whose weights count."""
        recompute_blocks(transformer, adapter.plan, budget=budget)
        sizes = [_run(transformer, adapter, sampling, recorder) for sampling in samplings]
        tokens = [adapter.token_count(sampling, TEXT_TOKENS) for sampling in samplings]
        unread = sum(
            weight.nbytes
            for block in blocks
            for weight in block.parameters()
            if not weight.requires_grad and _key(weight) not in recorder.tensors
        )
        return _row(torch.tensor(sizes, dtype=torch.float64), tokens, unread_bytes=unread)

    # in this order: a module that recomputes its blocks never stops
    whole = _modules(transformer, adapter.plan, partial(row, 1.0))
    norm_itemsize = recorder.norm_itemsize(adapter.width)
    recomputed = _modules(transformer, adapter.plan, partial(row, 0.0))
    return Saved(whole=whole, recomputed=recomputed, norm_itemsize=norm_itemsize)


def _modules(
    transformer: nn.Module, plan: ParallelPlan, row: Callable[..., SavedRow]
) -> SavedModules:
    """Measure one block of each kind and what is outside. row: measures the blocks that are left.

    Blocks of a list may differ: the last one of SD3 has no text behind it. Each kind is measured
    behind the list's first block, so that it gets what blocks get.
    """
    lists = {
        name: cast(nn.ModuleList, transformer.get_submodule(name)) for name in plan.block_lists
    }
    for name, blocks in lists.items():
        transformer.set_submodule(name, blocks[:1])
    first = row()

    rows: list[SavedRow] = []
    outside = first
    for name, blocks in lists.items():
        kinds: dict[tuple[torch.Size, ...], SavedRow] = {}
        for block in blocks:
            shapes = tuple(parameter.shape for parameter in block.parameters())
            if shapes not in kinds:
                transformer.set_submodule(name, nn.ModuleList([blocks[0], block]))
                kinds[shapes] = row(block).less(first)
            rows.append(kinds[shapes])
        outside = outside.less(rows[-len(blocks)])
        transformer.set_submodule(name, blocks[:1])

    for name, blocks in lists.items():
        transformer.set_submodule(name, blocks)
    return SavedModules(blocks=tuple(rows), outside=outside)


def _row(bytes_SK: Tensor, tokens: list[TokenCount], *, unread_bytes: int) -> SavedRow:
    """Split the bytes [sizes, kinds] of one row into those of an image token and the rest."""
    image_token_K = (bytes_SK[1] - bytes_SK[0]) / (tokens[1].image - tokens[0].image)
    text_K = bytes_SK[0] - tokens[0].image * image_token_K
    return SavedRow(
        image_token=dict(zip(KINDS, image_token_K.tolist(), strict=True)),
        text=dict(zip(KINDS, text_K.tolist(), strict=True)),
        text_tokens=tokens[0].text,
        unread_bytes=unread_bytes,
    )


def _fill(transformer: nn.Module, dtype: torch.dtype) -> None:
    """Put fake weights in dtype on the CPU in place of those on meta, as engines compute with."""
    # a CPU's fused attention keeps no scores, like a GPU's; on meta attention would keep them
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        for module in transformer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                fake = torch.empty(parameter.shape, dtype=dtype)
                weight = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                setattr(module, name, weight)


def _watch(transformer: nn.Module, adapter: ModelAdapter, recorder: BlockRecorder) -> None:
    """Tell the recorder where attention and MLPs begin and end: children of blocks with linears."""
    plan = adapter.plan
    kinds = plan.kinds([name for name, _ in transformer.named_parameters()])
    regions = set()
    for name, kind in kinds.items():
        block = plan.block_of(name)
        if kind in LINEAR_KINDS and block:
            child = name.removeprefix(f"{block}.").partition(".")[0]
            regions.add(f"{block}.{child}")
    for name, module in transformer.named_modules():
        if name in regions:
            module.register_forward_pre_hook(recorder.enter, with_kwargs=True)
            module.register_forward_hook(recorder.leave)
        elif name.endswith(LORA_A.removesuffix(".weight")):
            module.register_forward_hook(recorder.multiplied)


def _run(
    transformer: nn.Module, adapter: ModelAdapter, sampling: Sampling, recorder: BlockRecorder
) -> list[float]:
    """Return the bytes of KINDS that one row saves."""
    recorder.inputs.clear()
    recorder.tensors.clear()

    num_tokens, channels = adapter.latents_shape(sampling)
    # real tensors, as the adapter looks into the mask; they turn fake where they meet weights
    conditioning = {
        name: tensor.expand(ROWS, *tensor.shape[1:])
        for name, tensor in adapter.blank_text(TEXT_TOKENS).items()
    }
    if sampling.images:
        conditioning[IMAGE_LATENTS] = torch.zeros(ROWS, *adapter.image_latents_shape(sampling))

    latents_BLC = torch.zeros(ROWS, num_tokens, channels)
    saves = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
    with torch.enable_grad(), saves:
        adapter.velocity(transformer, latents_BLC, torch.ones(ROWS), conditioning, sampling)
    weights = {_key(parameter) for parameter in transformer.parameters()}
    return [num_bytes / ROWS for num_bytes in recorder.bytes_by_kind(weights)]


def _key(tensor: Tensor) -> int:
    """Identify a tensor's storage; a fake one has no address."""
    return tensor.untyped_storage()._cdata
