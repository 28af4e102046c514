"""Share what the families' adapters have alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megadiff.models.adapter import ImageEncoder, ModelAdapter
from megadiff.models.vae import encode_pixels
from megadiff.types import Prompt, Sampling


class AdapterBase(ModelAdapter):
    """Give an adapter what follows from its classes' names and its forward passes."""

    transformer_class: str  # this and the VAE's are in diffusers
    vae_class: str
    tokenizer_class: str  # in transformers

    def is_guided(self, sampling: Sampling) -> bool:
        return any(self.num_passes(component, sampling) > 1 for component in self.components)

    def empty_transformer(self, component: str = "transformer") -> nn.Module:
        import diffusers
        from accelerate import init_empty_weights

        stock = getattr(diffusers, self.transformer_class)
        with init_empty_weights():
            return stock.from_config(stock.load_config(self.model_folder / component))

    def adapt_vae(self, vae: nn.Module) -> None:
        """Make the family's VAE fast, in place; by default nothing."""

    @contextmanager
    def image_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[ImageEncoder]:
        import diffusers

        stock = getattr(diffusers, self.vae_class)
        vae = stock.from_pretrained(self.model_folder / "vae", torch_dtype=dtype).to(device)
        self.adapt_vae(vae)
        with freed(vae):
            # an image is a video of one frame
            yield lambda pixels: encode_pixels(vae, pixels[:, None] if pixels.ndim == 4 else pixels)

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
        # a token is at least one byte, the marks of start and end apart
        fits = len(text.encode()) + 2 <= self.max_prompt_tokens
        return 0 if fits else len(tokenizer(text).input_ids)


def check_pixels(sampling: Sampling, multiple: int) -> None:
    """Raise ValueError for a height or width that is no positive multiple of a token's pixels."""
    for name, pixels in (("height", sampling.height), ("width", sampling.width)):
        if pixels < multiple or pixels % multiple:
            nearest = max(round(pixels / multiple), 1) * multiple
            raise ValueError(
                f"rollout.{name}={pixels} is not a positive multiple of {multiple} (pixels a "
                f"token); set rollout.{name}={nearest}"
            )


def encoded_text(conditioning: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """Return (embeddings, mask) of the prompts, or with prefix "negative_" of those.

    Raises ValueError when they are absent.
    """
    names = [f"{prefix}prompt_embeds", f"{prefix}prompt_mask"]
    missing = [name for name in names if name not in conditioning]
    if missing:
        raise ValueError(
            f"guidance needs {', '.join(missing)} in the conditioning {sorted(conditioning)}; "
            "sample with the same guidance as training uses"
        )
    return conditioning[names[0]], conditioning[names[1]]


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
