"""Attend jointly to Qwen-Image's text and image, with tokens and heads split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.models.qwen_image.rotary import rotate
from megadiff.parallel.attention import TokenAxes


@dataclass(frozen=True, kw_only=True)
class WholeStreams:
    """Describe the unsplit streams of one forward for attention.

    text_length, image_length: tokens without padding.
    mask: [B, 1, 1, text + image] bool, or None when all text counts.
    text_rotary_SD, image_rotary_SD: torch.view_as_real of the rotations of all tokens.
    """

    text_length: int
    image_length: int
    mask: Tensor | None
    text_rotary_SD: Tensor
    image_rotary_SD: Tensor


class QwenImageAttention:
    """Fulfil parallel.attention.TokenAttention.

    Its values are those of diffusers' QwenDoubleStreamAttnProcessor2_0.
    """

    def __init__(self, tokens: TokenAxes) -> None:
        self.tokens = tokens

    def prepare(self, transformer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        image_BSC = kwargs["hidden_states"]
        text_BSC = kwargs["encoder_hidden_states"]
        # forward calls pos_embed itself too, but with the length of its own chunk of text
        image_rotary_SD, text_rotary_SD = transformer.pos_embed(
            kwargs["img_shapes"], max_txt_seq_len=text_BSC.shape[1], device=image_BSC.device
        )

        streams = WholeStreams(
            text_length=text_BSC.shape[1],
            image_length=image_BSC.shape[1],
            mask=_joint_mask(kwargs.get("encoder_hidden_states_mask"), image_BSC),
            text_rotary_SD=torch.view_as_real(text_rotary_SD),
            image_rotary_SD=torch.view_as_real(image_rotary_SD),
        )
        attention_kwargs = {**(kwargs.get("attention_kwargs") or {}), "streams": streams}
        return {**kwargs, "encoder_hidden_states_mask": None, "attention_kwargs": attention_kwargs}

    def __call__(
        self,
        attn: Any,  # diffusers' Attention
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        streams: WholeStreams,
        encoder_hidden_states_mask: None = None,
        attention_mask: None = None,
        image_rotary_emb: object = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (image, text) [B, chunk, C], this rank's chunks.

        The last three arguments are diffusers' and unused.
        """
        # a gather for each stream: concatenating them costs more than a second collective
        text_NSC, image_NSC = (
            self.tokens.enter_split(x) for x in (encoder_hidden_states, hidden_states)
        )
        head_dim = attn.inner_dim // attn.heads
        text = [
            layer(text_NSC).unflatten(-1, (-1, head_dim))
            for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        ]
        image = [
            layer(image_NSC).unflatten(-1, (-1, head_dim))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        ]
        lengths = (streams.text_length, streams.image_length)
        text, image = self.tokens.all_tokens([text, image], lengths)

        text = _rotated(text, attn.norm_added_q, attn.norm_added_k, streams.text_rotary_SD)
        image = _rotated(image, attn.norm_q, attn.norm_k, streams.image_rotary_SD)
        query, key, value = (
            torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(text, image, strict=True)
        )
        joint_BHSD = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=streams.mask
        )

        text_BSHD, image_BSHD = joint_BHSD.transpose(1, 2).split(lengths, dim=1)
        text_NSC, image_NSC = self.tokens.own_tokens([text_BSHD, image_BSHD])
        return attn.to_out[0](image_NSC), attn.to_add_out(text_NSC)


def _rotated(
    stream: list[Tensor], norm_q: nn.Module, norm_k: nn.Module, rotary_SD: Tensor
) -> list[Tensor]:
    """Normalise per head and rotate a stream's query and key; each, as value, [B, S, H, D]."""
    query, key, value = stream
    return [rotate(norm_q(query), rotary_SD), rotate(norm_k(key), rotary_SD), value]


def _joint_mask(text_mask_BS: Tensor | None, image_BSC: Tensor) -> Tensor | None:
    """Return True where a key is attended to: text tokens of the mask, then all image tokens."""
    if text_mask_BS is None:
        return None
    image_mask_BS = torch.ones(image_BSC.shape[:2], dtype=torch.bool, device=image_BSC.device)
    return torch.cat([text_mask_BS.bool(), image_mask_BS], dim=1)[:, None, None, :]
