"""Share what the families' adapters have alike: load, encode, check prompts, free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.models.adapter import PromptEncoder
from megadiff.types import Prompt


class EncodesPrompts:
    """Give an adapter what follows from its prompt_encoder and its tokenizer."""

    model_folder: Path
    max_prompt_tokens: int
    tokenizer_class: str  # in transformers

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
        """Return (embeddings [B, tokens, D] in dtype, mask [B, tokens] bool), on the CPU.

        Loads the text encoder (5.7 to 7 B parameters in the real models) for the call and frees it
        afterwards.
        """
        with self.prompt_encoder(dtype=dtype, device=device) as encode:
            return encode(texts)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        texts = dict.fromkeys(
            text for prompt in prompts for text in (prompt.text, prompt.negative_text)
        )
        # most texts fit by their bytes, without the tokenizer, which takes seconds to load
        long = [text for text in texts if len(text.encode()) + 2 > self.max_prompt_tokens]
        if not long:
            return
        import transformers

        tokenizer = getattr(transformers, self.tokenizer_class).from_pretrained(
            self.model_folder / "tokenizer"
        )
        for text in long:
            count = self.num_prompt_tokens(text, tokenizer)
            if count > self.max_prompt_tokens:
                raise ValueError(
                    f"a prompt has {count} tokens ({len(text)} characters), the model takes "
                    f"{self.max_prompt_tokens} and would cut off the rest; "
                    f"shorten {text[:60]!r}…"
                )

    def num_prompt_tokens(self, text: str, tokenizer: Any) -> int:
        return num_tokens(text, tokenizer, limit=self.max_prompt_tokens)


def num_tokens(text: str, tokenizer: Any, *, limit: int) -> int:
    """Count a text's tokens, special ones included; 0 where its bytes show that it fits."""
    # a token is at least one byte, the marks of start and end apart
    return len(tokenizer(text).input_ids) if len(text.encode()) + 2 > limit else 0


@contextmanager
def freed(module: nn.Module) -> Iterator[None]:
    """Free the module's memory at the end of the context."""
    try:
        yield
    finally:
        # not `del`: the caller's name for the encoder may outlive the context
        module.to("meta")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
