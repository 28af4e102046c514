"""Encode Wan's prompts: one function for trainer and replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# the text's width in every forward; beyond the prompt zeros, which the model attends to
TEXT_TOKENS = 512


def cleaned(text: str) -> str:
    """Make runs of white space one space, as vllm-omni does."""
    # diffusers also resolves HTML entities, where the text has any
    return " ".join(text.split())


@torch.no_grad()
def encode(texts: Sequence[str], tokenizer: Any, text_encoder: Any) -> tuple[Tensor, Tensor]:
    """Return (embeddings [B, tokens, D], mask [B, tokens] bool), as wide as the longest text.

    Embeddings are zero beyond a text's own tokens.
    """
    # at the full width, so that a text's embedding does not depend on the others'
    inputs = tokenizer(
        [cleaned(text) for text in texts],
        padding="max_length",
        max_length=TEXT_TOKENS,
        truncation=True,
        return_attention_mask=True,
        return_tensors="pt",
    ).to(text_encoder.device)
    embeds_BTD = text_encoder(inputs.input_ids, inputs.attention_mask).last_hidden_state
    mask_BT = inputs.attention_mask.bool()

    # cut again: only the encoder must see the full width
    width = int(mask_BT.sum(dim=1).max())
    mask_BT = mask_BT[:, :width]
    return embeds_BTD[:, :width] * mask_BT[:, :, None], mask_BT


def padded(text: Mapping[str, Tensor]) -> Tensor:
    """Return prompt_embeds as [B, TEXT_TOKENS, D], zero beyond each row's own tokens.

    Raises ValueError when they are too long.
    """
    embeds_BTD = text["prompt_embeds"]
    num_tokens = embeds_BTD.shape[1]
    if num_tokens > TEXT_TOKENS:
        raise ValueError(
            f"prompt_embeds has {num_tokens} tokens, the model takes {TEXT_TOKENS}; "
            "shorten the prompt"
        )

    embeds_BTD = embeds_BTD * text["prompt_mask"].to(embeds_BTD, non_blocking=True)[:, :, None]
    return functional.pad(embeds_BTD, (0, 0, 0, TEXT_TOKENS - num_tokens))
