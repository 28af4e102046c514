"""Adapt Wan to the trainer: experts, timesteps of single tokens, given first frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.models.adapter import Images
from megadiff.models.conditioning import IMAGE_LATENTS, Conditioning
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.guided_family import GuidedFamily
from megadiff.models.packing import PATCH, pack, unpack
from megadiff.models.pipeline_folder import check_sizes
from megadiff.models.wan22 import text as wan_text
from megadiff.models.wan22.attention import WanAttention
from megadiff.models.wan22.checkpoint import (
    HIGH_NOISE,
    LOW_NOISE,
    boundary_ratio_of,
    check_experts,
)
from megadiff.models.wan22.plan import PLAN
from megadiff.models.wan22.text import TEXT_TOKENS
from megadiff.tensors.model_files import read_json
from megadiff.types import Sampling, Tensors

NUM_TIMESTEPS = 1000


class WanAdapter(GuidedFamily):
    """Work with one transformer (Wan2.1, TI2V-5B), or two experts that divide the schedule (A14B).

    boundary_ratio: the high-noise expert is in charge from this sigma on; None with one
    transformer. expands_timesteps: they are of single tokens, 0 for those of a given first frame.
    given_channels: of the transformer's input beside the latents', for a given first frame.
    """

    title = "Wan2.1 and Wan2.2"
    published = {
        "Wan2.1 T2V, 1.3 B and 14 B": "",
        "Wan2.2 TI2V-5B": "1 and 2 × H200",
        "Wan2.2 TI2V-5B, [from a first frame](docs/video.md#image-to-video)": "",
        "Wan2.2 T2V-A14B, two experts": "2 × H200, LoRA, [both experts](docs/performance.md#video)",
    }
    text_width_key = "text_dim"
    other_sizes = ("in_channels", "out_channels", "ffn_dim", "text_dim")
    pipeline_class = "WanPipeline"
    rollout_pipeline = "megadiff.models.wan22.pipeline:WanRolloutPipeline"
    plan = PLAN
    attention = staticmethod(WanAttention)
    # Four frames, one latent, are decoded at a time, so few bytes depend on a video's length. The
    # figure for a pixel is TI2V-5B's peak on an H200; A14B's is 5 % lower.
    decoding = Decoding(
        pixels={"cpu": 2**18, "cuda": 2**25},
        bytes_per_pixel=11_648,
        bytes_per_frame=18,
    )
    # VeOmni drops the last tokens' rotation where sp does not divide them, and cuts no timesteps:
    # its engine takes the stock module, so there is nothing to adapt_veomni_module()
    veomni_splits_tokens = False
    max_prompt_tokens = TEXT_TOKENS
    transformer_class = "WanTransformer3DModel"
    vae_class = "AutoencoderKLWan"
    tokenizer_class = "AutoTokenizer"
    given_channels = 0

    def __init__(self, model_folder: Path | str) -> None:
        """Read the folder's JSON files.

        Raises ValueError for a missing file or key, and for a Wan that this family does not cover.
        """
        super().__init__(model_folder)
        index = read_json(self.model_folder / "model_index.json")
        self.boundary_ratio = boundary_ratio_of(self.model_folder, index)
        if self.boundary_ratio is not None:
            self.components = (HIGH_NOISE, LOW_NOISE)
            self.guidance_keys = ("guidance_scale", "guidance_scale_2")
        configs = {name: self.read_config(name) for name in self.components}
        check_experts(self.model_folder, configs, given_channels=self.given_channels)
        sizes = (*self.size_keys, *self.other_sizes)
        differing = [key for key in sizes if configs[self.components[-1]][key] != self.config[key]]
        if differing:
            raise ValueError(
                f"{self.model_folder}: its experts differ in {', '.join(differing)}; they must be "
                "of one shape"
            )

        self.expands_timesteps = bool(index.get("expand_timesteps"))
        self.most_images = 1 if self.expands_timesteps or self.given_channels else 0
        # as the authors play TI2V-5B's and T2V-A14B's videos; no file says it
        self.frames_per_s = 24 if self.expands_timesteps else 16
        self.channels = self.config["out_channels"]
        self.mlp_ratio = self.config["ffn_dim"] / self.width

        path = self.model_folder / "vae" / "config.json"
        # diffusers' defaults, for a config that names neither
        given = {name: value for name, value in read_json(path).items() if value is not None}
        vae = {"scale_factor_spatial": 8, "scale_factor_temporal": 4} | given
        check_sizes(path, vae, ("scale_factor_spatial", "scale_factor_temporal"))
        self.spatial = vae["scale_factor_spatial"]
        self.temporal = vae["scale_factor_temporal"]

    def component_of(self, sigma: float) -> str:
        """Return the expert in charge: high noise from 1000·boundary_ratio on."""
        if self.boundary_ratio is None:
            return HIGH_NOISE
        # to a thousandth, as a float32 sigma of 0.9 lies a little below 0.9
        timestep = round(NUM_TIMESTEPS * sigma, 3)
        boundary = round(NUM_TIMESTEPS * self.boundary_ratio, 3)
        return HIGH_NOISE if timestep >= boundary else LOW_NOISE

    def guidance_scale(self, component: str, sampling: Sampling) -> float:
        if component == LOW_NOISE:
            return sampling.guidance_scale_2 or sampling.guidance_scale
        return sampling.guidance_scale

    def num_prompt_tokens(self, text: str, tokenizer: Any) -> int:
        return super().num_prompt_tokens(wan_text.cleaned(text), tokenizer)

    def validate(self, sampling: Sampling) -> None:
        super().validate(sampling)
        frames = sampling.num_frames
        temporal = self.temporal
        if frames < 1 or (frames - 1) % temporal:
            nearest = max(round((frames - 1) / temporal), 0) * temporal + 1
            raise ValueError(
                f"rollout.num_frames={frames} is not 1 + a multiple of {temporal} (frames a latent "
                f"after the first); set rollout.num_frames={nearest}"
            )
        if not sampling.images:
            return
        if sampling.images[0] != (sampling.height, sampling.width):
            rows, columns = sampling.images[0]
            raise ValueError(
                f"a given image has {columns}x{rows} pixels, a first frame must have the video's "
                f"{sampling.width}x{sampling.height}; scale or crop the file, or set rollout.width "
                "and rollout.height"
            )
        if frames == 1:
            raise ValueError(
                "rollout.images=true with rollout.num_frames=1: the only frame is given and "
                f"nothing is drawn; set rollout.num_frames={1 + temporal} or more"
            )

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        """Return (tokens, channels) of what is drawn: all frames, or all but a given first."""
        grid = self.grid(sampling)
        num_given = grid.tokens_per_frame if self.has_clean_tokens(sampling) else 0
        return grid.num_tokens - num_given, self.channels * PATCH**2

    def has_clean_tokens(self, sampling: Sampling) -> bool:
        """Tell whether the first frame's tokens are given, and not drawn."""
        return bool(sampling.images) and self.expands_timesteps

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        # Timesteps are never in the model's dtype: bfloat16 rounds 978 to 980.
        video_BCFHW, timestep = self.model_input(
            latents_BLC, NUM_TIMESTEPS * sigma_B, text, sampling
        )
        (velocity_BCFHW,) = transformer(
            hidden_states=video_BCFHW,
            timestep=timestep,
            encoder_hidden_states=wan_text.padded(text).to(video_BCFHW),
            return_dict=False,
        )[:1]
        return pack(velocity_BCFHW)[:, -latents_BLC.shape[1] :]

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

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        embeds_BTD, mask_BT = wan_text.encode(texts, pipeline.tokenizer, pipeline.text_encoder)
        return {"prompt_embeds": embeds_BTD, "prompt_mask": mask_BT}

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
        feed_forward = 4 * s * d * self.config["ffn_dim"]
        one_pass = self.num_layers * (own_attention + text_attention + feed_forward)

        # experts may differ in their guidance, and so in the passes of a step
        sigmas = self.schedule(sampling)[:-1].tolist()
        passes = [self.num_passes(self.component_of(sigma), sampling) for sigma in sigmas]
        return float(one_pass * sum(passes) / len(passes))
