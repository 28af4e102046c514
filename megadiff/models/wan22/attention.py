"""Wan's self and cross attention where tokens and heads are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.parallel.attention import TokenAxes


class WanAttention:
    """Fulfils parallel.attention.TokenAttention; the same values as diffusers' WanAttnProcessor.

    Self attention sees all tokens of this rank's heads. In cross attention a video token needs only itself and the text,
    so nothing is exchanged over sp: each rank's own tokens read the whole text, which every rank has.
    """

    def __init__(self, tokens: TokenAxes) -> None:
        self.tokens = tokens

    def prepare(self, transformer: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(kwargs)

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[B, chunk, C] of this rank's chunk. rotary_emb: (cos, sin), each [1, S, 1, D], of all S tokens; with the text
        instead, cross attention. attention_mask is diffusers' and unused."""
        stream_NSC = self.tokens.enter_split(hidden_states)
        if rotary_emb is not None:
            attended_NSC = self._own_attention(attn, stream_NSC, *rotary_emb)
        else:
            attended_NSC = self._text_attention(attn, stream_NSC, encoder_hidden_states)
        return attn.to_out[1](attn.to_out[0](attended_NSC))

    def _own_attention(
        self, attn: nn.Module, stream_NSC: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor
    ) -> Tensor:
        heads = [_heads(attn, each) for each in _projected(attn, stream_NSC, stream_NSC)]
        ((query, key, value),) = self.tokens.all_tokens([heads], [cos_1S1D.shape[1]])
        query, key = (_rotated(each, cos_1S1D, sin_1S1D) for each in (query, key))
        (attended_NSC,) = self.tokens.own_tokens([_attended(query, key, value)])
        return attended_NSC

    def _text_attention(self, attn: nn.Module, stream_NSC: Tensor, text_BTC: Tensor) -> Tensor:
        query, key, value = (
            _heads(attn, each)
            for each in _projected(attn, stream_NSC, self.tokens.enter_context(text_BTC))
        )
        return _attended(
            query, self.tokens.for_gathered(key), self.tokens.for_gathered(value)
        ).flatten(2)


def _projected(attn: nn.Module, queried: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; query and key are normalised across heads."""
    return attn.norm_q(attn.to_q(queried)), attn.norm_k(attn.to_k(read)), attn.to_v(read)


def _heads(attn: nn.Module, features: Tensor) -> Tensor:
    """[N, S, heads · D] → [N, S, heads, D], of this rank's heads."""
    return features.unflatten(-1, (-1, attn.inner_dim // attn.heads))


def _attended(query_BSHD: Tensor, key_BTHD: Tensor, value_BTHD: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query_BSHD, key_BTHD, value_BTHD))
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _rotated(x_BSHD: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor) -> Tensor:
    """Pairs of neighbouring channels turned by their token's angle, which the tables hold once for each channel."""
    even, odd = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_1S1D[..., 0::2], sin_1S1D[..., 1::2]
    return (
        torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        .flatten(-2)
        .type_as(x_BSHD)
    )
