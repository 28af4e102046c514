"""Run Wan's self and cross attention with tokens and heads split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:  # needs megatron-core, which a whole module does not
    from megadiff.parallel.attention import TokenAxes


class WanAttention:
    """Fulfil parallel.attention.TokenAttention, with the values of diffusers' WanAttnProcessor.

    Self attention sees all tokens of this rank's heads. In cross attention a video token needs only
    itself and the text, which every rank has. So nothing is exchanged over sp there.
    """

    def __init__(self, tokens: TokenAxes) -> None:
        self.tokens = tokens

    def prepare(self, transformer: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(kwargs)

    def __call__(
        self,
        attn: Any,  # diffusers' WanAttention
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return [B, chunk, C], this rank's chunk.

        rotary_emb: (cos, sin), each [1, S, 1, D], of all S tokens; with the text instead, cross
        attention. attention_mask is diffusers' and unused.
        """
        stream_NSC = self.tokens.enter_split(hidden_states)
        if rotary_emb is not None:
            attended_NSC = self._own_attention(attn, stream_NSC, *rotary_emb)
        else:
            assert encoder_hidden_states is not None  # diffusers gives one of the two
            attended_NSC = self._text_attention(attn, stream_NSC, encoder_hidden_states)
        return attn.to_out[1](attn.to_out[0](attended_NSC))

    def _own_attention(
        self, attn: Any, stream_NSC: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor
    ) -> Tensor:
        heads = _projected(attn, stream_NSC, stream_NSC)
        ((query, key, value),) = self.tokens.all_tokens([heads], [cos_1S1D.shape[1]])
        query = _rotated(query, cos_1S1D, sin_1S1D)
        key = _rotated(key, cos_1S1D, sin_1S1D)
        (attended_NSC,) = self.tokens.own_tokens([_attended(query, key, value)])
        return attended_NSC

    def _text_attention(self, attn: Any, stream_NSC: Tensor, text_BTC: Tensor) -> Tensor:
        query, key, value = _projected(attn, stream_NSC, self.tokens.enter_context(text_BTC))
        return _attended(
            query, self.tokens.for_gathered(key), self.tokens.for_gathered(value)
        ).flatten(2)


def _projected(attn: Any, queried: Tensor, read: Tensor) -> list[Tensor]:
    """Return query, key and value of this rank's heads, each [N, S, heads, D].

    Query and key are normalised across heads.
    """
    features = attn.norm_q(attn.to_q(queried)), attn.norm_k(attn.to_k(read)), attn.to_v(read)
    head_dim = attn.inner_dim // attn.heads
    return [projected_NSC.unflatten(-1, (-1, head_dim)) for projected_NSC in features]


def _attended(query_BSHD: Tensor, key_BTHD: Tensor, value_BTHD: Tensor) -> Tensor:
    attended_BHSD = functional.scaled_dot_product_attention(
        query_BSHD.transpose(1, 2), key_BTHD.transpose(1, 2), value_BTHD.transpose(1, 2)
    )
    return attended_BHSD.transpose(1, 2)


def _rotated(x_BSHD: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor) -> Tensor:
    """Turn pairs of neighbouring channels by their token's angle."""
    even, odd = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    # the tables have an angle once for each channel, so twice for a pair
    cos = cos_1S1D[..., 0::2]
    sin = sin_1S1D[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).type_as(x_BSHD)
