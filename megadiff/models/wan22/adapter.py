"""Adapt Wan2.2 to the trainer: latents, conditioning, timesteps, guidance, schedule, experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megadiff.diffusion.guidance import plain_cfg
from megadiff.models.adapter import Images, ModelAdapter, PromptEncoder, freed
from megadiff.models.conditioning import IMAGE_LATENTS, NEGATIVE, Conditioning, text_of_side
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.packing import pack, unpack
from megadiff.models.wan22 import text as wan_text
from megadiff.models.wan22.checkpoint import HIGH_NOISE, WanCheckpoint
from megadiff.models.wan22.plan import PLAN
from megadiff.models.wan22.text import TEXT_TOKENS
from megadiff.types import Sampling, Tensors

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes


class WanAdapter(WanCheckpoint, ModelAdapter):
    """Work with diffusers' own transformer and every engine's."""

    title = "Wan2.1 and Wan2.2"
    published = {
        "Wan2.1 T2V, 1.3 B and 14 B": "",
        "Wan2.2 TI2V-5B": "1 and 2 × H200",
        "Wan2.2 TI2V-5B, [from a first frame](docs/video.md#image-to-video)": "",
        "Wan2.2 T2V-A14B, two experts": "",
    }
    text_width_key = "text_dim"
    pipeline_class = "WanPipeline"
    rollout_pipeline = "megadiff.models.wan22.pipeline:WanRolloutPipeline"
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
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
        *,
        component: str = HIGH_NOISE,
    ) -> Tensor:
        """Return the velocity [B, L, C] float32, guided by the component's own scale.

        conditioning: prompt_embeds [B, tokens, D] and prompt_mask [B, tokens], with negative_ in
        front as well under guidance; image_latents where the first frame is given.
        """
        timestep = self.timestep(sigma_B).to(latents_BLC.device)
        video_BCFHW, timestep = self.model_input(latents_BLC, timestep, conditioning, sampling)
        video_BCFHW = video_BCFHW.to(transformer.dtype)

        def one_pass(prefix: str) -> Tensor:
            text = text_of_side(conditioning, prefix, latents_BLC.device)
            (velocity_BCFHW,) = transformer(
                hidden_states=video_BCFHW,
                timestep=timestep,
                encoder_hidden_states=wan_text.padded(text).to(video_BCFHW),
                return_dict=False,
            )[:1]
            return pack(velocity_BCFHW)[:, -latents_BLC.shape[1] :]

        # guidance is computed in the transformer's output dtype; both passes carry gradient
        velocity_BLC = one_pass("")
        scale = self.guidance_scale(component, sampling)
        if scale > 1:
            velocity_BLC = plain_cfg(velocity_BLC, one_pass(NEGATIVE), scale)
        return velocity_BLC.float()

    def model_input(
        self,
        latents_BLC: Tensor,
        timestep_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
    ) -> tuple[Tensor, Tensor]:
        """Return the transformer's latents [B, C, F, H, W] and timesteps, [B] or [B, tokens].

        With image_latents [B, grid.tokens_per_frame, C], latents_BLC are the tokens of the other
        frames. The transformer sees the given ones too, clean, at timestep 0.
        """
        timestep = timestep_B
        if (first_BLC := conditioning.get(IMAGE_LATENTS)) is not None:
            first_BLC = first_BLC.to(latents_BLC)
            # a timestep for each token: 0 says that the given ones are clean
            clean_BL = timestep_B.new_zeros(first_BLC.shape[:2])
            drawn_BL = timestep_B[:, None].expand(latents_BLC.shape[:2])
            timestep = torch.cat([clean_BL, drawn_BL], dim=1)
            latents_BLC = torch.cat([first_BLC, latents_BLC], dim=1)
        return unpack(latents_BLC, self.grid(sampling)), timestep

    def decode(
        self, vae: Any, latents_NLC: Tensor, sampling: Sampling, conditioning: Conditioning
    ) -> Tensor:
        """Decode, with the given frames in front again, clean."""
        if self.has_clean_tokens(sampling):
            first_NLC = conditioning[IMAGE_LATENTS].to(latents_NLC)
            latents_NLC = torch.cat([first_NLC, latents_NLC], dim=1)
        return super().decode(vae, latents_NLC, sampling, conditioning)

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

        def encode(texts: Sequence[str], images: Sequence[Images] = ()) -> Tensors:
            embeds_BTD, mask_BT = wan_text.encode(texts, tokenizer, text_encoder)
            return {"prompt_embeds": embeds_BTD.to("cpu", dtype), "prompt_mask": mask_BT.cpu()}

        with freed(text_encoder):
            yield encode

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """Count tokens; the text is padded, whatever num_text_tokens."""
        # all frames: the tokens of a given first frame pass through all blocks
        image = self.grid(sampling).num_tokens
        return TokenCount(
            image=image, text=TEXT_TOKENS, is_modulated=self.has_clean_tokens(sampling)
        )

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
