"""Attend over Z-Image's one stream, image and then text, with tokens and heads split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from megadiff.models.qwen_image.rotary import rotate

if TYPE_CHECKING:  # needs megatron-core, which a whole module does not
    from megadiff.parallel.attention import TokenAxes


class ZImageAttention:
    """Fulfil parallel.attention.TokenAttention.

    Its values are those of diffusers' ZSingleStreamAttnProcessor.
    """

    def __init__(self, tokens: TokenAxes) -> None:
        self.tokens = tokens

    def prepare(self, transformer: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        # every block gets mask and rotations of the whole stream already
        return dict(kwargs)

    def __call__(
        self,
        attn: Any,  # diffusers' Attention
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's chunk [B, chunk, C].

        attention_mask: [B, S] bool, None where all rows are equally long.
        freqs_cis: [B, S, D / 2] complex. Each row has its own, as an image's positions begin after
        its text's.
        """
        assert freqs_cis is not None  # the stock block always gives it
        stream_NSC = self.tokens.enter_split(hidden_states)
        head_dim = attn.inner_dim // attn.heads
        heads = [
            layer(stream_NSC).unflatten(-1, (-1, head_dim))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        ]
        ((query, key, value),) = self.tokens.all_tokens([heads], [freqs_cis.shape[1]])

        query = rotate(attn.norm_q(query), freqs_cis)
        key = rotate(attn.norm_k(key), freqs_cis)
        mask = None if attention_mask is None else attention_mask[:, None, None]
        attended_BHSD = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
        )

        (own_NSC,) = self.tokens.own_tokens([attended_BHSD.transpose(1, 2)])
        return attn.to_out[0](own_NSC)
