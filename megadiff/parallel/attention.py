"""Split a transformer's tokens and heads over ranks, and show attention whole streams.

Outside attention a rank has its own tokens and a sharded layer's own features. Inside it has all
tokens of its own heads. Every stream is padded with zeros to equal chunks, one a rank:
- with sequence parallelism chunk sp_rank·tp + tp_rank;
- without it chunk sp_rank, and all tp ranks hold the same tokens.
Padding is cut off before attention and at the output.

Collectives gather and scatter along the first dimension, whatever it means. Streams stay batch
first, so a gathered one is [tp·B, chunk, …] with ranks outermost. Per-token layers do not care.
Only attention needs the order of tokens, and moves them.

Shape letters: B samples, S tokens, N = B times the ranks gathered, Q query/key/value, H heads, D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.parallel.regions import (
    Group,
    copy_to_group,
    exchange,
    gather_for_all,
    gather_for_parts,
    scatter_sum,
    sum_for_all,
)


@dataclass(frozen=True, kw_only=True)
class TokenAxes:
    """Name the ranks over which tokens and heads are split.

    tp_group: heads and features. sp_group: Ulysses.
    token_group: the ranks that hold different tokens, in the order of the chunks.
    sequence_parallel: whether tp ranks are among them.
    multiple: a chunk's length is a multiple of it.
    """

    tp_group: Group
    sp_group: Group
    token_group: Group
    sequence_parallel: bool
    multiple: int = 1

    tp = property(lambda self: self.tp_group.size)
    sp = property(lambda self: self.sp_group.size)
    num_chunks = property(lambda self: self.token_group.size)

    def split(self, stream_BSC: Tensor) -> Tensor:
        """Return this rank's chunk [B, chunk, …] of a stream that all ranks have.

        Backward gives the whole stream's gradient by this rank's tokens alone. So each rank has
        a part of the gradient of all weights before it.
        """
        chunks_BNSC = self._in_chunks(stream_BSC)
        return chunks_BNSC[:, self.token_group.rank].contiguous()

    def gather(self, chunk_BSC: Tensor, length: int) -> Tensor:
        """Return the whole stream [B, length, C] on every rank."""
        # backward takes this rank's part of the gradient without a sum: all compute the same loss
        return self._in_order(gather_for_all(chunk_BSC, self.token_group), length)

    def enter_split(self, chunk_BSC: Tensor) -> Tensor:
        """Return the tokens of this rank and its tp peers, [N, chunk, C].

        They enter layers whose features are split over tp, q, k and v among them. Each peer uses
        them for other features, so backward sums over tp.
        """
        if self.sequence_parallel:
            return gather_for_parts(chunk_BSC, self.tp_group)
        return copy_to_group(chunk_BSC, self.tp_group)

    def enter_context(self, context_BTC: Tensor) -> Tensor:
        """Return tokens that only keys and values come from, whole on every rank.

        Each tp rank's gradient of them is its heads' part. Without sequence parallelism it is
        summed here. With it the gradients of whole weights are parts, and are summed after the
        last backward, those of the weights behind the context among them.
        """
        return context_BTC if self.sequence_parallel else copy_to_group(context_BTC, self.tp_group)

    def for_gathered(self, context_BTHD: Tensor) -> Tensor:
        """Repeat a sample's context [B, T, H, D] to [N, T, H, D], as enter_split() gathers."""
        return context_BTHD.repeat(self.tp, 1, 1, 1) if self.sequence_parallel else context_BTHD

    def leave_split(self, part_NSC: Tensor) -> Tensor:
        """Sum the ranks' parts after a layer whose input features are split over tp.

        Returns this rank's tokens [B, chunk, C]. Backward gives each rank the gradient of its
        peers' tokens as well.
        """
        combine = scatter_sum if self.sequence_parallel else sum_for_all
        return combine(part_NSC, self.tp_group)

    def all_tokens(
        self, streams: Sequence[Sequence[Tensor]], lengths: Sequence[int]
    ) -> list[list[Tensor]]:
        """Return each stream's whole tensors [B, length, heads / (tp·sp), D], without padding.

        streams: (query, key, value) of each stream, [N, chunk, heads / tp, D], of the tokens of
        enter_split(). Tokens come back in order.
        """
        if self.sp > 1:
            streams = self._exchanged(streams)
        whole = []
        for stream, length in zip(streams, lengths, strict=True):
            whole.append([self._in_order(chunks_NSHD, length) for chunks_NSHD in stream])
        return whole

    def own_tokens(self, streams_BSHD: Sequence[Tensor]) -> list[Tensor]:
        """Undo all_tokens() for attention's output of each stream.

        Returns the tokens of this rank and its tp peers, [N, chunk, heads / tp · D]; padding is 0.
        """
        # each [num_chunks, B, chunk, H, D]
        in_chunks = [self._in_chunks(stream).transpose(0, 1) for stream in streams_BSHD]
        if self.sp == 1:
            return [chunks.flatten(0, 1).flatten(2) for chunks in in_chunks]

        # [sp, N, tokens, H, D]: the chunks of each sp rank, with those of its tp peers
        by_tokens = torch.cat(in_chunks, dim=2).flatten(0, 1).unflatten(0, (self.sp, -1))
        chunk_NSHD = exchange(by_tokens, self.sp_group).movedim(0, 2).flatten(2, 3)

        chunk_sizes = [chunks.shape[2] for chunks in in_chunks]
        streams_NSC = chunk_NSHD.flatten(2).split(chunk_sizes, dim=1)
        return [stream_NSC.contiguous() for stream_NSC in streams_NSC]

    def _exchanged(self, streams: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Exchange by Ulysses: all heads of a chunk → all chunks of 1/sp of the heads.

        [N, chunk, H, D] → [sp·N, chunk, H / sp, D].
        """
        # one all-to-all for all streams, and for query, key and value
        joint_NSQHD = torch.cat([torch.stack(list(stream), dim=2) for stream in streams], dim=1)
        by_heads = joint_NSQHD.unflatten(3, (self.sp, -1)).movedim(3, 0)
        by_tokens = exchange(by_heads, self.sp_group).flatten(0, 1)
        chunk_sizes = [stream[0].shape[1] for stream in streams]
        return [stream.unbind(2) for stream in by_tokens.split(chunk_sizes, dim=1)]

    def _in_chunks(self, stream_BSx: Tensor) -> Tensor:
        """Cut [B, S, …] into [B, num_chunks, chunk, …], padded with zeros."""
        padding = -stream_BSx.shape[1] % (self.num_chunks * self.multiple)
        if padding:
            stream_BSx = functional.pad(stream_BSx, (0, 0) * (stream_BSx.ndim - 2) + (0, padding))
        return stream_BSx.unflatten(1, (self.num_chunks, -1))

    def _in_order(self, chunks_NSx: Tensor, length: int) -> Tensor:
        """Join [num_chunks · B, chunk, …] to [B, length, …], padding cut off."""
        chunks_BNSx = chunks_NSx.unflatten(0, (self.num_chunks, -1)).transpose(0, 1)
        return chunks_BNSx.flatten(1, 2)[:, :length]


class TokenAttention(Protocol):
    """Process a model's attention under split tokens.

    It holds no state of a forward: a recomputed block would see another forward's.
    """

    def prepare(self, transformer: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return forward's arguments, with facts of the whole streams in attention_kwargs."""

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Attend in place of the stock processor; diffusers calls it."""
