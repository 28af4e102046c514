"""What the adapters' encoders of text and images share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from megadiff.models.adapter import PromptEncoder


class EncodesPrompts:
    """An adapter's encode_prompt, by its prompt_encoder."""

    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> AbstractContextManager[PromptEncoder]:
        raise NotImplementedError

    def encode_prompt(
        self,
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """(embeddings [B, tokens, D] in dtype, mask [B, tokens] bool), on the CPU.

        Loads the text encoder (5.7 to 7 B parameters in the real models) for the call and frees it afterwards.
        """
        with self.prompt_encoder(dtype=dtype, device=device) as encode:
            return encode(texts)


@contextmanager
def freed(module: nn.Module) -> Iterator[None]:
    """Afterwards the module holds no memory, though the caller's name for its encoder may outlive the block."""
    try:
        yield
    finally:
        module.to("meta")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
