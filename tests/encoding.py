"""Prompts encoded as the trainer's adapter does, on the CPU in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megadiff.models.adapter import ModelAdapter


def encode_prompts(adapter: ModelAdapter, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return (embeddings, mask) of all texts in one call."""
    with adapter.prompt_encoder(dtype=torch.float32, device=torch.device("cpu")) as encode:
        encoded = encode(texts)
    return encoded["prompt_embeds"], encoded["prompt_mask"]
