"""Give attention all tokens of a module that is not split, without megatron-core."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class OneRank:
    """Stand for TokenAxes where a rank has all tokens and heads."""

    def enter_split(self, stream_BSC: Tensor) -> Tensor:
        return stream_BSC

    def all_tokens(
        self, streams: Sequence[Sequence[Tensor]], lengths: Sequence[int]
    ) -> Sequence[Sequence[Tensor]]:
        return streams

    def own_tokens(self, streams_BSHD: Sequence[Tensor]) -> list[Tensor]:
        return [stream_BSHD.flatten(2) for stream_BSHD in streams_BSHD]
