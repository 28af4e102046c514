"""Adapt Wan2.2 to the trainer: latents, conditioning, timesteps, guidance, schedule, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megadiff.models.adapter import Conditioning, ModelAdapter, PromptEncoder, freed
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.wan22 import text as wan_text
from megadiff.models.wan22.checkpoint import HIGH_NOISE, WanCheckpoint
from megadiff.models.wan22.plan import PLAN
from megadiff.models.wan22.velocity import TEXT_TOKENS, wan_velocity
from megadiff.types import Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes


class WanAdapter(WanCheckpoint, ModelAdapter):
    """Work with diffusers' own transformer and every engine's."""

    plan = PLAN
    # Four frames, one latent, are decoded at a time, so few bytes depend on a video's length.
    decoding = Decoding(
        pixels={"cpu": 2**18, "cuda": 2**25}, bytes_per_pixel=10_752, bytes_per_frame=18
    )
    # VeOmni drops the last tokens' rotation where sp does not divide them, and cuts no timesteps:
    # its engine takes the stock module, so there is nothing to adapt_veomni_module()
    veomni_splits_tokens = False
    max_prompt_tokens = TEXT_TOKENS
    transformer_class = "WanTransformer3DModel"
    vae_class = "AutoencoderKLWan"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, model_folder: Path | str) -> None:
        """Read model_folder, a diffusers pipeline folder, as WanCheckpoint does."""
        super().__init__(model_folder)
        self.mlp_ratio = self.ffn_width / self.width

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        from megadiff.models.wan22.attention import WanAttention

        return WanAttention(tokens)

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        self.check_float32_streams()

    def check_float32_streams(self) -> None:
        raise ValueError(
            "model.float32_streams=true, but Wan's streams are in its weights' dtype; "
            "set it to false"
        )

    def num_prompt_tokens(self, text: str, tokenizer: Any) -> int:
        return super().num_prompt_tokens(wan_text.cleaned(text), tokenizer)

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
            self.timestep(sigma_B),
            conditioning,
            grid=self.grid(sampling),
            guidance_scale=self.guidance_scale(component, sampling),
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

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """Count tokens; the text is padded, whatever num_text_tokens."""
        # all frames: the tokens of a given first frame pass through all blocks
        image = self.grid(sampling).num_tokens
        return TokenCount(image=image, text=TEXT_TOKENS, is_modulated=bool(sampling.images))

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Return the mean over the schedule; the text is padded, whatever num_text_tokens."""
        s = self.grid(sampling).num_tokens
        t = TEXT_TOKENS
        d = self.width

        # 2 operations a multiply-add. Query and output are of the s video tokens,
        # keys and values of the text attention of its t tokens.
        own_attention = 8 * s * d**2 + 4 * s**2 * d
        text_attention = 4 * (s + t) * d**2 + 4 * s * t * d
        feed_forward = 4 * s * d * self.ffn_width
        one_pass = self.num_layers * (own_attention + text_attention + feed_forward)

        # experts may differ in their guidance, and so in the passes of a step
        sigmas = self.schedule(sampling)[:-1].tolist()
        passes = [self.num_passes(self.component_of(sigma), sampling) for sigma in sigmas]
        return float(one_pass * sum(passes) / len(passes))
