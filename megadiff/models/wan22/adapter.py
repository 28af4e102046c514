"""Adapt Wan2.2 to the trainer: latents, conditioning, timesteps, guidance, schedule, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from megadiff.types import Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes


class WanAdapter(EncodesPrompts):
    """Fulfil models.adapter.ModelAdapter, with diffusers' own transformer and every engine's."""

    plan = PLAN
    decoding = wan_vae.DECODING
    # VeOmni drops the last tokens' rotation where sp does not divide them, and cuts no timesteps
    veomni_splits_tokens = False
    max_prompt_tokens = TEXT_TOKENS
    tokenizer_class = "AutoTokenizer"

    def __init__(self, model_folder: Path | str) -> None:
        """Read model_folder, a diffusers pipeline folder, as WanCheckpoint.read does."""
        self.model_folder = Path(model_folder)
        self.checkpoint = WanCheckpoint.read(self.model_folder)
        self.components = self.checkpoint.components
        self.num_heads = self.checkpoint.num_heads
        self.width = self.checkpoint.width
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
            "model.float32_streams=true, but Wan's streams are in its weights' dtype; "
            "set it to false"
        )

    def validate(self, sampling: Sampling) -> None:
        self.checkpoint.validate(sampling)

    def num_prompt_tokens(self, text: str, tokenizer: Any) -> int:
        return wan_text.num_tokens(text, tokenizer)

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
        """Return wan_velocity guided by the component's own scale; both passes carry gradient."""
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
        text_encoder: Any = UMT5EncoderModel.from_pretrained(
            self.model_folder / "text_encoder", dtype=dtype
        )
        text_encoder.to(device)

        def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
            embeds_BTD, mask_BT = wan_text.encode(texts, tokenizer, text_encoder)
            return embeds_BTD.to("cpu", dtype), mask_BT.cpu()

        with freed(text_encoder):
            yield encode

    @contextmanager
    def image_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[ImageEncoder]:
        """Encode images [B, H, W, 3] or videos [B, F, H, W, 3] by the checkpoint's VAE, in dtype.

        F is 1 + a multiple of the VAE's temporal factor. Latents come back normalised in float32;
        they stay on the device.
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
        """Count tokens; the text is padded, whatever num_text_tokens."""
        # all frames: the tokens of a given first frame pass through all blocks
        image = self.checkpoint.grid(sampling).num_tokens
        return TokenCount(image=image, text=TEXT_TOKENS, is_modulated=sampling.first_frame)

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Return the mean over the schedule; the text is padded, whatever num_text_tokens."""
        s = self.checkpoint.grid(sampling).num_tokens
        t = TEXT_TOKENS
        d = self.width
        own_attention = 8 * s * d**2 + 4 * s**2 * d
        text_attention = 4 * (s + t) * d**2 + 4 * s * t * d
        feed_forward = 4 * s * d * self.checkpoint.ffn_width
        one_pass = self.checkpoint.num_layers * (own_attention + text_attention + feed_forward)
        sigmas = self.schedule(sampling)[:-1].tolist()
        passes = [self.num_passes(self.component_of(sigma), sampling) for sigma in sigmas]
        return float(one_pass * sum(passes) / len(passes))
