"""Tokens and heads of a transformer split over ranks: how token streams are cut up, and how attention sees them whole.

Outside attention a rank has its own tokens and, of a sharded layer, its features; inside it has all tokens of its own
heads. Every stream is padded with zeros to equal chunks, one a rank: chunk sp_rank·tp + tp_rank with sequence parallelism,
chunk sp_rank without it (then all tp ranks hold the same tokens). Padding is cut off before attention and at the output.

megatron-core gathers and scatters along the first dimension, whatever it means. Streams stay batch first, so a gathered
one is [tp·B, chunk, …] with ranks outermost: per-token layers do not care, and only attention, which needs the order of
tokens, moves them. Shape letters: B samples, S tokens, N = B times the ranks gathered, Q query/key/value, H heads, D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from megadiff.parallel.regions import copy_to_group


@dataclass(frozen=True, kw_only=True)
class TokenAxes:
    """Over which ranks tokens and heads are split.

    tp_group: heads and features. sp_group: Ulysses. token_group: the ranks that hold different tokens, in the order of
    the chunks. sequence_parallel: whether tp ranks are among them. multiple: what a chunk's length must be a multiple of.
    """

    tp_group: dist.ProcessGroup
    sp_group: dist.ProcessGroup
    token_group: dist.ProcessGroup
    sequence_parallel: bool
    multiple: int = 1

    tp = property(lambda self: self.tp_group.size())
    sp = property(lambda self: self.sp_group.size())
    num_chunks = property(lambda self: self.token_group.size())

    def split(self, stream_BSC: Tensor) -> Tensor:
        """This rank's chunk [B, chunk, …] of a stream that all ranks have. Backward gives the whole stream's gradient by this
        rank's tokens alone: of all weights before it each rank has a part."""
        chunks_BNSC = self._in_chunks(stream_BSC)
        return chunks_BNSC[:, self.token_group.rank()].contiguous()

    def gather(self, chunk_BSC: Tensor, length: int) -> Tensor:
        """The whole stream [B, length, C] on every rank. Backward takes this rank's part of the gradient, without a sum:
        all ranks compute the same loss of it."""
        gathered_NSC = gather_from_sequence_parallel_region(
            chunk_BSC, tensor_parallel_output_grad=False, group=self.token_group
        )
        return self._in_order(gathered_NSC, length)

    def enter_split(self, chunk_BSC: Tensor) -> Tensor:
        """Into layers whose features are split over tp, q, k and v among them: the tokens of its tp peers as well, [N, chunk, C].

        Each peer uses them for other features, so backward sums over tp.
        """
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(chunk_BSC, group=self.tp_group)
        return copy_to_group(chunk_BSC, self.tp_group)

    def enter_context(self, context_BTC: Tensor) -> Tensor:
        """Tokens that only keys and values come from, whole on every rank: for the q, k and v of its own heads.

        Each tp rank's gradient of them is its heads' part. Without sequence parallelism it is summed here; with it, that of
        the weights behind them is, as they are parts of all that is whole.
        """
        return context_BTC if self.sequence_parallel else copy_to_group(context_BTC, self.tp_group)

    def for_gathered(self, context_BTHD: Tensor) -> Tensor:
        """[B, T, H, D], the same for all tokens of a sample → [N, T, H, D], beside the tokens of enter_split()."""
        return context_BTHD.repeat(self.tp, 1, 1, 1) if self.sequence_parallel else context_BTHD

    def leave_split(self, part_NSC: Tensor) -> Tensor:
        """The way back, after a layer whose input features are split over tp: the sum of the ranks' parts, of this rank's
        tokens [B, chunk, C]. May overwrite the part. Backward gives each rank the gradient of its peers' tokens as well."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(part_NSC, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(part_NSC.contiguous(), group=self.tp_group)

    def all_tokens(
        self, streams: Sequence[Sequence[Tensor]], lengths: Sequence[int]
    ) -> list[list[Tensor]]:
        """Of each stream its tensors (query, key, value) [B, length, heads / (tp·sp), D], in order and without padding.

        streams: the same tensors as [N, chunk, heads / tp, D], of the tokens of enter_split().
        """
        if self.sp > 1:
            streams = self._exchanged(streams)
        return [
            [self._in_order(each, length) for each in stream]
            for stream, length in zip(streams, lengths, strict=True)
        ]

    def own_tokens(self, streams_BSHD: Sequence[Tensor]) -> list[Tensor]:
        """The way back: this rank's and its tp peers' tokens [N, chunk, heads / tp · D] of each stream, padding as zeros."""
        in_chunks = [
            self._in_chunks(stream).transpose(0, 1) for stream in streams_BSHD
        ]  # [num_chunks, B, chunk, H, D]
        if self.sp == 1:
            return [chunks.flatten(0, 1).flatten(2) for chunks in in_chunks]
        by_tokens = torch.cat(in_chunks, dim=2).flatten(0, 1).unflatten(0, (self.sp, -1))
        chunk_NSHD = all_to_all(self.sp_group, by_tokens.contiguous()).movedim(0, 2).flatten(2, 3)
        chunk_NSC = chunk_NSHD.flatten(2)
        return [
            each.contiguous()
            for each in chunk_NSC.split([part.shape[2] for part in in_chunks], dim=1)
        ]

    def _exchanged(self, streams: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Ulysses, one all-to-all for everything: all heads of a chunk [N, chunk, H, D] → all chunks of 1/sp of the heads
        [sp·N, chunk, H / sp, D]."""
        joint_NSQHD = torch.cat([torch.stack(list(stream), dim=2) for stream in streams], dim=1)
        by_heads = joint_NSQHD.unflatten(3, (self.sp, -1)).movedim(3, 0)
        by_tokens = all_to_all(self.sp_group, by_heads.contiguous()).flatten(0, 1)
        return [
            each.unbind(2)
            for each in by_tokens.split([stream[0].shape[1] for stream in streams], dim=1)
        ]

    def _in_chunks(self, stream_BSx: Tensor) -> Tensor:
        """[B, S, …] → [B, num_chunks, chunk, …], padded with zeros."""
        padding = -stream_BSx.shape[1] % (self.num_chunks * self.multiple)
        if padding:
            stream_BSx = functional.pad(stream_BSx, (0, 0) * (stream_BSx.ndim - 2) + (0, padding))
        return stream_BSx.unflatten(1, (self.num_chunks, -1))

    def _in_order(self, chunks_NSx: Tensor, length: int) -> Tensor:
        """[num_chunks · B, chunk, …] → [B, length, …], padding cut off."""
        return (
            chunks_NSx.unflatten(0, (self.num_chunks, -1)).transpose(0, 1).flatten(1, 2)[:, :length]
        )


class TokenAttention(Protocol):
    """A model's attention processor under split tokens. It holds no state of a forward: recompute would see another's."""

    def prepare(self, transformer: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of forward, with all that attention must know of the whole streams moved to attention_kwargs."""

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Called by diffusers in place of the stock processor."""
