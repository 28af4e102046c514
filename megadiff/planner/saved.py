"""Measure what autograd saves of one forward of a transformer, on fake tensors without memory.

Saved bytes are linear in blocks, tokens and rows. So small forwards of one and of two blocks of the
real width give the bytes of any plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from megadiff.models.adapter import IMAGE_LATENTS, ModelAdapter
from megadiff.parallel.lora import Adapters, adapt_linears
from megadiff.parallel.plan import LINEAR_KINDS, LORA_A
from megadiff.types import LoraSpec, Sampling

TOKENWISE = "tokenwise"
INPUTS = "inputs"
HEADS = "heads"
KINDS = (TOKENWISE, INPUTS, HEADS)
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
    image_token: bytes of one image token. text: bytes of all else, almost only of the TEXT_TOKENS,
    or of the length to which the family pads every text.
    """

    image_token: dict[str, float]
    text: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Hold what one block saves, without its weights, and what all modules outside the blocks save.

    norm_itemsize: bytes of a number in norms and residual sums.
    """

    block: SavedRow
    outside: SavedRow
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
    """Return what the family's stock transformer in dtype saves, uncompiled and not recomputed."""
    transformer = adapter.empty_transformer()
    if lora:
        adapt_linears(transformer, Adapters(lora))
    if float32_streams:
        adapter.keep_streams_in_float32(transformer, dtype)

    samplings = [
        Sampling(
            height=height,
            width=WIDTH,
            num_frames=VIDEO_FRAMES if modulates_tokens else 1,
            images=((height, WIDTH),) if modulates_tokens else (),
            num_inference_steps=1,
        )
        for height in HEIGHTS
    ]

    config: Any = transformer.config  # of diffusers, without types
    recorder = BlockRecorder(half_head=config.attention_head_dim // 2)
    _watch(transformer, adapter, recorder)

    blocks_name = adapter.plan.blocks.removesuffix(".*")
    bytes_by_blocks = {}
    for num_blocks in (2, 1):  # falling, as blocks that are cut off are gone
        setattr(transformer, blocks_name, getattr(transformer, blocks_name)[:num_blocks])
        _fill(transformer, dtype)
        bytes_by_blocks[num_blocks] = torch.tensor(
            [_run(transformer, adapter, sampling, recorder) for sampling in samplings],
            dtype=torch.float64,
        )

    image_tokens = [adapter.token_count(sampling, TEXT_TOKENS).image for sampling in samplings]
    # the last block of a stack may save less, and it is in both: their difference is a whole block
    block_SK = bytes_by_blocks[2] - bytes_by_blocks[1]
    return Saved(
        block=_row(block_SK, image_tokens),
        outside=_row(bytes_by_blocks[1] - block_SK, image_tokens),
        norm_itemsize=recorder.norm_itemsize(adapter.width),
    )


def _row(bytes_SK: Tensor, image_tokens: list[int]) -> SavedRow:
    """Split the bytes [sizes, kinds] of one row into those of an image token and the rest."""
    image_token_K = (bytes_SK[1] - bytes_SK[0]) / (image_tokens[1] - image_tokens[0])
    text_K = bytes_SK[0] - image_tokens[0] * image_token_K
    return SavedRow(
        image_token=dict(zip(KINDS, image_token_K.tolist(), strict=True)),
        text=dict(zip(KINDS, text_K.tolist(), strict=True)),
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
    depth = adapter.plan.blocks.count(".") + 2
    kinds = adapter.plan.kinds([name for name, _ in transformer.named_parameters()])
    linears = [name for name, kind in kinds.items() if kind in LINEAR_KINDS]
    regions = {".".join(name.split(".")[:depth]) for name in linears}
    for name, module in transformer.named_modules():
        if name in regions:
            module.register_forward_pre_hook(recorder.enter, with_kwargs=True)
            module.register_forward_hook(recorder.leave)
        elif name.endswith(LORA_A.removesuffix(".weight")):
            module.register_forward_hook(recorder.multiplied)


def _run(
    transformer: nn.Module, adapter: ModelAdapter, sampling: Sampling, recorder: BlockRecorder
) -> list[int]:
    """Return the bytes of KINDS that one row saves."""
    recorder.inputs.clear()
    recorder.tensors.clear()

    num_tokens, channels = adapter.latents_shape(sampling)
    # real tensors, as the adapter looks into the mask; they turn fake where they meet weights
    conditioning = adapter.blank_text(TEXT_TOKENS)
    if sampling.images:
        conditioning[IMAGE_LATENTS] = torch.zeros(1, *adapter.image_latents_shape(sampling))

    latents_BLC = torch.zeros(1, num_tokens, channels)
    saves = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor)
    with torch.enable_grad(), saves:
        adapter.velocity(transformer, latents_BLC, torch.ones(1), conditioning, sampling)
    return recorder.bytes_by_kind({_key(parameter) for parameter in transformer.parameters()})


def _key(tensor: Tensor) -> int:
    """Identify a tensor's storage; a fake one has no address."""
    return tensor.untyped_storage()._cdata
