"""Attend jointly to BAGEL's prompt, marks and latents, with tokens and heads split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megadiff.parallel.one_rank import OneRank

if TYPE_CHECKING:  # needs megatron-core, which a whole module does not
    from megadiff.models.bagel.transformer import BagelSizes
    from megadiff.parallel.attention import TokenAxes

NUM_MARKS = 2  # of the image's start and end
GENERATION = "_moe_gen"  # the end of the generation expert's names; the other expert's have none

Rotary = tuple[Tensor, Tensor]  # cos and sin, each [B or 1, S or 1, 1, head_dim / 2]


@dataclass(frozen=True, kw_only=True)
class BagelStreams:
    """Describe the unsplit streams of one forward.

    lengths: tokens of the context (prompt and marks) and of the latents, without padding.
    mask: [B, 1, 1, context + latents] bool, or None where all of the prompt counts.
    prompt, image: rotations. Marks and latents have one position, the row's own prompt length.
    """

    lengths: tuple[int, int]
    mask: Tensor | None
    prompt: Rotary
    image: Rotary

    @classmethod
    def of(
        cls, sizes: BagelSizes, latents_BLC: Tensor, context_BS: Tensor, prompt_mask_BT: Tensor
    ) -> BagelStreams:
        """Return those of the transformer's arguments, none of them split."""
        device = prompt_mask_BT.device
        lengths = context_BS.shape[1], latents_BLC.shape[1]
        exponents = torch.arange(0, sizes.head_dim, 2, device=device).float() / sizes.head_dim

        def rotary(positions_BS: Tensor) -> Rotary:
            angles = positions_BS.float()[..., None, None] / sizes.rope_theta**exponents
            # rounded before the product, as the replica does
            return angles.cos().to(latents_BLC.dtype), angles.sin().to(latents_BLC.dtype)

        num_rows, width = prompt_mask_BT.shape
        mask = None
        if not prompt_mask_BT.all():
            rest = prompt_mask_BT.new_ones(num_rows, sum(lengths) - width)
            mask = torch.cat([prompt_mask_BT, rest], dim=1)[:, None, None]
        return cls(
            lengths=lengths,
            mask=mask,
            prompt=rotary(torch.arange(width, device=device)[None]),
            image=rotary(prompt_mask_BT.sum(dim=1)[:, None]),
        )


class BagelAttention:
    """Fulfil parallel.attention.TokenAttention.

    Values are those of vllm-omni's PackedAttentionMoT.
    """

    def __init__(self, tokens: TokenAxes | None = None) -> None:
        self.tokens = tokens or OneRank()

    def prepare(self, transformer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        whole = (kwargs[name] for name in ("hidden_states", "context_ids", "prompt_mask"))
        return {**kwargs, "streams": BagelStreams.of(transformer.sizes, *whole)}

    def __call__(
        self, attn: Any, context_BSC: Tensor, latents_BSC: Tensor, streams: BagelStreams
    ) -> tuple[Tensor, Tensor]:
        """Return context and latents [B, chunk, C], this rank's chunks."""
        queries = []
        pairs = []
        for stream_BSC, expert in ((context_BSC, ""), (latents_BSC, GENERATION)):
            stream_NSC = self.tokens.enter_split(stream_BSC)
            layers = [getattr(attn, f"{name}_proj{expert}") for name in "qkv"]
            query, *pair = (
                layer(stream_NSC).unflatten(-1, (-1, attn.head_dim)) for layer in layers
            )
            queries.append([query])
            pairs.append(pair)
        # keys have fewer heads than queries, so they are exchanged apart
        (context_q,), (latents_q,) = self.tokens.all_tokens(queries, streams.lengths)
        (context_k, context_v), (latents_k, latents_v) = self.tokens.all_tokens(
            pairs, streams.lengths
        )

        context_q = _of_context(attn.q_norm(context_q), streams)
        context_k = _of_context(attn.k_norm(context_k), streams)
        latents_q = _rotated(attn.q_norm_moe_gen(latents_q), streams.image)
        latents_k = _rotated(attn.k_norm_moe_gen(latents_k), streams.image)

        sizes = [streams.lengths[0] - NUM_MARKS, NUM_MARKS]
        prompt_q, marks_q = context_q.split(sizes, dim=1)
        prompt_k, marks_k = context_k.split(sizes, dim=1)
        prompt_v, marks_v = context_v.split(sizes, dim=1)
        # the prompt depends on frozen weights alone
        prompt_k = prompt_k.detach()
        prompt_v = prompt_v.detach()

        # Padding comes after the prompt, so that a causal prompt never sees it.
        prompt = _attended(prompt_q.detach(), prompt_k, prompt_v, is_causal=True)
        image = _attended(
            torch.cat([marks_q, latents_q], dim=1),
            torch.cat([prompt_k, marks_k, latents_k], dim=1),
            torch.cat([prompt_v, marks_v, latents_v], dim=1),
            attn_mask=streams.mask,
        )
        marks, latents = image.split([NUM_MARKS, streams.lengths[1]], dim=1)
        context_NSC, latents_NSC = self.tokens.own_tokens(
            [torch.cat([prompt, marks], dim=1), latents]
        )
        return attn.o_proj(context_NSC), attn.o_proj_moe_gen(latents_NSC)


def _of_context(x_BSHD: Tensor, streams: BagelStreams) -> Tensor:
    """Rotate the context: a prompt's tokens by their own positions, the marks by the image's."""
    prompt, marks = x_BSHD.split([x_BSHD.shape[1] - NUM_MARKS, NUM_MARKS], dim=1)
    return torch.cat([_rotated(prompt, streams.prompt), _rotated(marks, streams.image)], dim=1)


def _rotated(x_BSHD: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    first, second = x_BSHD.chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(rotated, dim=-1).type_as(x_BSHD)


def _attended(query_BSHD: Tensor, key_BTHD: Tensor, value_BTHD: Tensor, **options: Any) -> Tensor:
    # Grouped queries: fast kernels with a mask want a key for each query head.
    repeats = query_BSHD.shape[2] // key_BTHD.shape[2]
    keys = key_BTHD.repeat_interleave(repeats, dim=2)
    values = value_BTHD.repeat_interleave(repeats, dim=2)
    attended_BHSD = functional.scaled_dot_product_attention(
        query_BSHD.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), **options
    )
    return attended_BHSD.transpose(1, 2)
