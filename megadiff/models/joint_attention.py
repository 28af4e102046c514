"""Attend jointly to text and image, with tokens and heads split over ranks.

The layers have diffusers' names, which Qwen-Image, SD3.5 and FLUX have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:  # needs megatron-core, which a whole module does not
    from megadiff.parallel.attention import TokenAxes

# layers of query, key and value, then the norms of query and key
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
IMAGE = ("to_q", "to_k", "to_v", "norm_q", "norm_k")


@dataclass(frozen=True, kw_only=True)
class WholeStream:
    """Describe one unsplit stream. length: its tokens without padding.

    rotary_SD: the rotations of all tokens, as rotate() takes them; None for models that add
    positions to their tokens.
    """

    length: int
    rotary_SD: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Return the length, to torch.compile as a tensor's size where one has it.

        It takes a plain number for a constant, and compiles again for another.
        """
        return self.length if self.rotary_SD is None else self.rotary_SD.shape[0]


@dataclass(frozen=True, kw_only=True)
class WholeStreams:
    """Describe both streams. mask: [B, 1, 1, text + image] bool; None when all text counts."""

    text: WholeStream
    image: WholeStream
    mask: Tensor | None = None

    def text_dims(self) -> list[tuple[Tensor, int]]:
        """Return the tensors with a dimension that changes with the text's length, and which."""
        dims = []
        if self.text.rotary_SD is not None:
            dims.append((self.text.rotary_SD, 0))
        if self.mask is not None:
            dims.append((self.mask, self.mask.ndim - 1))
        return dims


class JointAttention:
    """Fulfil parallel.attention.TokenAttention, with the values of diffusers' processors.

    A family gives prepare(), which hands on WholeStreams as `streams`, and rotate() if it rotates.
    """

    def __init__(self, tokens: TokenAxes) -> None:
        self.tokens = tokens

    def prepare(self, transformer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def rotate(self, x_BSHD: Tensor, rotary_SD: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(
        self,
        attn: Any,  # diffusers' Attention
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        streams: WholeStreams,
        encoder_hidden_states_mask: None = None,
        attention_mask: None = None,
        image_rotary_emb: object = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (image, text) [B, chunk, C], this rank's chunks; without text the image alone.

        The last three arguments are diffusers' and unused.
        """
        sites = [(IMAGE, hidden_states, streams.image)]
        if encoder_hidden_states is not None:
            # first, as in the mask
            sites.insert(0, (TEXT, encoder_hidden_states, streams.text))
        lengths = [stream.num_tokens for _, _, stream in sites]

        # a gather for each stream: concatenating them costs more than a second collective
        gathered = [self.tokens.enter_split(chunk_BSC) for _, chunk_BSC, _ in sites]
        heads = []
        for (names, _, _), tokens_NSC in zip(sites, gathered, strict=True):
            head_dim = attn.inner_dim // attn.heads
            layers = [getattr(attn, name) for name in names[:3]]
            heads.append([layer(tokens_NSC).unflatten(-1, (-1, head_dim)) for layer in layers])

        whole = self.tokens.all_tokens(heads, lengths)
        for (names, _, stream), qkv in zip(sites, whole, strict=True):
            qkv[:2] = [
                self._positioned(getattr(attn, name), x_BSHD, stream.rotary_SD)
                for name, x_BSHD in zip(names[3:], qkv[:2], strict=True)
            ]
        query, key, value = (
            torch.cat(tensors, dim=1).transpose(1, 2) for tensors in zip(*whole, strict=True)
        )
        joint_BHSD = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=streams.mask
        )

        own = self.tokens.own_tokens(joint_BHSD.transpose(1, 2).split(lengths, dim=1))
        image_BSC = attn.to_out[0](own[-1])
        if encoder_hidden_states is None:
            return image_BSC
        # SD3.5's last block has no output layer for its text, which nobody reads
        return image_BSC, own[0] if attn.context_pre_only else attn.to_add_out(own[0])

    def _positioned(self, norm: Any, x_BSHD: Tensor, rotary_SD: Tensor | None) -> Tensor:
        """Normalise per head, where the model does, and rotate."""
        x_BSHD = x_BSHD if norm is None else norm(x_BSHD)
        return x_BSHD if rotary_SD is None else self.rotate(x_BSHD, rotary_SD)
