"""Wan's prompt encoding: one function for trainer and replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megadiff.models.wan22.velocity import TEXT_TOKENS


def cleaned(text: str) -> str:
    """Runs of white space are one space, as in vllm-omni. diffusers also resolves HTML entities, where the text has any."""
    return " ".join(text.split())


def num_tokens(text: str, tokenizer: Any) -> int:
    """With the end token. A token is at least one byte, the start's and end's marks apart: short texts need no count."""
    text = cleaned(text)
    return len(tokenizer(text).input_ids) if len(text.encode()) + 2 > TEXT_TOKENS else 0


@torch.no_grad()
def encode(texts: Sequence[str], tokenizer: Any, text_encoder: Any) -> tuple[Tensor, Tensor]:
    """(embeddings [B, tokens, D] of the longest text's width, zero beyond each one's own tokens; mask [B, tokens] bool).

    The encoder runs at the full width, so that a text's embedding does not depend on the others'.
    """
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
    width = int(mask_BT.sum(dim=1).max())
    embeds_BTD, mask_BT = embeds_BTD[:, :width], mask_BT[:, :width]
    return embeds_BTD * mask_BT[:, :, None], mask_BT
