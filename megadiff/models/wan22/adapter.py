"""Wan2.2 for the trainer: packed video latents, text conditioning, timesteps, guidance, schedule, two experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megadiff.models.adapter import Conditioning, ImageEncoder, PromptEncoder
from megadiff.models.decoding import TokenCount
from megadiff.models.encoders import EncodesPrompts, freed
from megadiff.models.wan22 import text as wan_text
from megadiff.models.wan22 import vae as wan_vae
from megadiff.models.wan22.checkpoint import HIGH_NOISE, WanCheckpoint
from megadiff.models.wan22.plan import PLAN
from megadiff.models.wan22.velocity import TEXT_TOKENS, wan_velocity
from megadiff.types import Prompt, Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes


class WanAdapter(EncodesPrompts):
    """Fulfils models.adapter.ModelAdapter. Works with diffusers' own transformer and with every engine's."""

    plan, decoding = PLAN, wan_vae.DECODING
    veomni_splits_tokens = False  # it drops the last tokens' rotation where sp does not divide them, and cuts no timesteps

    def __init__(self, model_folder: Path | str) -> None:
        """model_folder: a diffusers pipeline folder. Raises ValueError as WanCheckpoint.read does."""
        self.model_folder = Path(model_folder)
        self.checkpoint = WanCheckpoint.read(self.model_folder)
        self.components = self.checkpoint.components
        self.num_heads, self.width = self.checkpoint.num_heads, self.checkpoint.width
        self.frames_per_s = self.checkpoint.frames_per_s
        self.mlp_ratio = self.checkpoint.ffn_width / self.checkpoint.width

    def component_of(self, sigma: float) -> str:
        return self.checkpoint.component_of(sigma)

    def empty_transformer(self, component: str = HIGH_NOISE) -> nn.Module:
        from accelerate import init_empty_weights
        from diffusers import WanTransformer3DModel

        with init_empty_weights():
            return WanTransformer3DModel.from_config(
                WanTransformer3DModel.load_config(self.model_folder / component)
            )

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        from megadiff.models.wan22.attention import WanAttention

        return WanAttention(tokens)

    def adapt_veomni_module(self, transformer: nn.Module) -> None:
        pass  # the stock module is trained: veomni_splits_tokens

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        self.check_float32_streams()

    def check_float32_streams(self) -> None:
        raise ValueError(
            "model.float32_streams=true, but Wan's streams are in its weights' dtype; set it to false"
        )

    def validate(self, sampling: Sampling) -> None:
        self.checkpoint.validate(sampling)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        texts = dict.fromkeys(
            text for prompt in prompts for text in (prompt.text, prompt.negative_text)
        )
        if all(len(text.encode()) + 2 <= TEXT_TOKENS for text in texts):
            return
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_folder / "tokenizer")
        for text in texts:
            count = wan_text.num_tokens(text, tokenizer)
            if count > TEXT_TOKENS:
                raise ValueError(
                    f"a prompt has {count} tokens ({len(text)} characters), the model takes {TEXT_TOKENS} and would cut "
                    f"off the rest; shorten {text[:60]!r}…"
                )

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        return self.checkpoint.latents_shape(sampling)

    def schedule(self, sampling: Sampling) -> Tensor:
        return self.checkpoint.schedule(sampling.num_inference_steps)

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        return self.checkpoint.shift(sigmas)

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if self.checkpoint.guidance_scale(component, sampling) > 1 else 1

    def velocity(
        self,
        transformer: Callable[..., tuple[Tensor]],
        latents_BLC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
        *,
        component: str = HIGH_NOISE,
    ) -> Tensor:
        """As wan_velocity says; guided by the component's own scale. Both passes carry gradient."""
        return wan_velocity(
            transformer,
            latents_BLC,
            self.checkpoint.timestep(sigma_B),
            conditioning,
            grid=self.checkpoint.grid(sampling),
            guidance_scale=self.checkpoint.guidance_scale(component, sampling),
        )

    @contextmanager
    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[PromptEncoder]:
        from transformers import AutoTokenizer, UMT5EncoderModel

        tokenizer = AutoTokenizer.from_pretrained(self.model_folder / "tokenizer")
        text_encoder = UMT5EncoderModel.from_pretrained(
            self.model_folder / "text_encoder", dtype=dtype
        ).to(device)

        def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
            embeds_BTD, mask_BT = wan_text.encode(texts, tokenizer, text_encoder)
            return embeds_BTD.to("cpu", dtype), mask_BT.cpu()

        with freed(text_encoder):
            yield encode

    @contextmanager
    def image_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[ImageEncoder]:
        """Of images [B, H, W, 3], or videos [B, F, H, W, 3], F being 1 + a multiple of the VAE's temporal factor.

        By the checkpoint's VAE: the mean of its posterior. Latents come back on the device. dtype: of the VAE; they are
        normalised in float32.
        """
        from diffusers import AutoencoderKLWan

        vae = AutoencoderKLWan.from_pretrained(self.model_folder / "vae", torch_dtype=dtype).to(
            device
        )
        with freed(vae):
            yield lambda pixels: wan_vae.encode(
                vae, pixels[:, None] if pixels.ndim == 4 else pixels
            )

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """The text is padded, whatever num_text_tokens; the tokens of a given first frame pass through all blocks."""
        image = self.checkpoint.grid(sampling).num_tokens
        return TokenCount(image=image, text=TEXT_TOKENS, is_modulated=sampling.first_frame)

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """The text is padded, whatever num_text_tokens. With two experts the mean over the schedule's steps."""
        s, t, d = self.checkpoint.grid(sampling).num_tokens, TEXT_TOKENS, self.width
        own_attention = 8 * s * d**2 + 4 * s**2 * d
        text_attention = 4 * (s + t) * d**2 + 4 * s * t * d
        feed_forward = 4 * s * d * self.checkpoint.ffn_width
        one_pass = self.checkpoint.num_layers * (own_attention + text_attention + feed_forward)
        sigmas = self.schedule(sampling)[:-1].tolist()
        passes = [self.num_passes(self.component_of(sigma), sampling) for sigma in sigmas]
        return float(one_pass * sum(passes) / len(passes))
