"""Derive the adapter of a text-to-image transformer from a few facts about the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megadiff.diffusion.guidance import plain_cfg
from megadiff.diffusion.schedule import static_shift, static_sigmas
from megadiff.models.adapter import ModelAdapter, check_pixels
from megadiff.models.conditioning import NEGATIVE, Conditioning, text_of_side
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.packing import PATCH, TokenGrid, pack, unpack
from megadiff.tensors.model_files import read_json
from megadiff.types import Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes


class ImageFamily(ModelAdapter):
    """Adapt a model of one transformer whose tokens are 2×2 latents of an image.

    A family gives `title`, `pipeline_class`, `transformer_class`, `rollout_pipeline`, `plan`,
    `prompt_encoder()` and `one_pass()`. Beyond that it overrides what differs.

    size_keys: of layers, heads and their width in transformer/config.json.
    vae_factor: pixels a latent, along each side. text_tokens: of every prompt, padding included,
    where the model pads all to one length; 0 where lengths differ.
    most_images: that a prompt may give; 0 for a model that makes images from text alone.
    guidance_key: the rollout key of the guidance scale; 1 is off.
    terminal: where unshifted sigmas end before 0, of the number of steps.
    """

    components = ("transformer",)
    mlp_ratio = 4.0
    frames_per_s = 1
    veomni_splits_tokens = False
    # A CPU is faster where a call's pixels stay in its caches. A GPU takes 145 ms for 16 images of
    # 512², four at a time; all at once take 139 ms, but 12.8 GiB in place of 3.2.
    decoding = Decoding(pixels={"cpu": 2**16, "cuda": 2**20}, bytes_per_pixel=3328)
    vae_class = "AutoencoderKL"
    size_keys = ("num_layers", "num_attention_heads", "attention_head_dim")
    vae_factor = 8
    text_tokens = 0
    most_images = 0
    guidance_key = "guidance_scale"

    def __init__(self, model_folder: Path | str) -> None:
        """Read the sizes from model_folder, a diffusers pipeline folder.

        Raises ValueError when transformer/config.json is missing or lacks a size.
        """
        self.model_folder = Path(model_folder)
        path = self.model_folder / self.components[0] / "config.json"
        self.config = read_json(path)
        missing = [key for key in self.size_keys if self.config.get(key) is None]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}; fetch it again")

        layers, heads, head_width = self.size_keys
        self.num_layers: int = self.config[layers]
        self.num_heads: int = self.config[heads]
        # some configs name the width of all heads together
        width = self.config[head_width]
        self.width: int = width if head_width == "dim" else self.num_heads * width

    def one_pass(
        self,
        transformer: Any,
        latents_BCHW: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the velocity [B, C, H, W] of one side of guidance, in the transformer's dtype.

        latents_BCHW: in the transformer's dtype. sigma_B: float32.
        text: what prompt_encoder() gives, a row for each sample; tensors of numbers are on the
        latents' device, masks where they were.
        """
        raise NotImplementedError

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        """Return one_pass() of packed latents [B, L, C], packed again."""
        latents_BCFHW = unpack(latents_BLC, self.grid(sampling))
        velocity_BCHW = self.one_pass(transformer, latents_BCFHW.squeeze(2), sigma_B, text)
        return pack(velocity_BCHW.unsqueeze(2))

    def guide(self, positive_BLC: Tensor, negative_BLC: Tensor, sampling: Sampling) -> Tensor:
        """Combine both sides' velocities, in the transformer's dtype."""
        return plain_cfg(positive_BLC, negative_BLC, self.guidance_scale(sampling))

    def guidance_scale(self, sampling: Sampling) -> float:
        """Return the scale of guidance; 1 is off."""
        return getattr(sampling, self.guidance_key)

    def velocity(
        self,
        transformer: Callable[..., Any],
        latents_BLC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
        *,
        component: str = "transformer",
    ) -> Tensor:
        latents_dtype_BLC = latents_BLC.to(transformer.dtype)  # type: ignore[attr-defined]  # modules
        sigma_B = sigma_B.float().to(latents_BLC.device)

        def one_side(prefix: str) -> Tensor:
            text = text_of_side(conditioning, prefix, latents_BLC.device)
            return self.packed_pass(transformer, latents_dtype_BLC, sigma_B, text, sampling)

        positive_BLC = one_side("")
        if not self.is_guided(sampling):
            return positive_BLC.float()

        # Both passes carry gradient. Always two: one of 2B where widths agree would let ranks
        # differ in their number of passes, and collectives hang.
        return self.guide(positive_BLC, one_side(NEGATIVE), sampling).float()

    def component_of(self, sigma: float) -> str:
        return self.components[0]

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        from megadiff.models.joint_attention import JointAttention

        return JointAttention(tokens)

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        self.check_float32_streams()

    def check_float32_streams(self) -> None:
        raise ValueError(
            f"model.float32_streams=true, but {self.title}'s streams are in its weights' dtype; "
            "set it to false"
        )

    def validate(self, sampling: Sampling) -> None:
        check_pixels(sampling, self.vae_factor * PATCH)
        if sampling.num_frames != 1:
            raise ValueError(
                f"rollout.num_frames={sampling.num_frames}, but {self.title} makes images; "
                "set it to 1"
            )
        if sampling.images and not self.most_images:
            raise ValueError(
                f"rollout.images=true, but {self.title} makes images from text alone; "
                "set it to false"
            )
        if self.most_images and not sampling.images:
            raise ValueError(
                f"rollout.images=false, but {self.title} edits images; set it to true, and give "
                "each row of data.prompts its `image`"
            )
        if len(sampling.images) > self.most_images:
            raise ValueError(
                f"{len(sampling.images)} images are given, {self.title} takes {self.most_images}; "
                "give fewer"
            )
        self._check_guidance(sampling)

    def _check_guidance(self, sampling: Sampling) -> None:
        scale = self.guidance_scale(sampling)
        if scale < 1:
            raise ValueError(f"rollout.{self.guidance_key}={scale} < 1 (off); set it to 1 or more")
        other = {"guidance_scale": "true_cfg_scale", "true_cfg_scale": "guidance_scale"}
        unused = other[self.guidance_key]
        if getattr(sampling, unused) != 1:
            raise ValueError(
                f"rollout.{unused}={getattr(sampling, unused)}, but {self.title}'s guidance is "
                f"another; set rollout.{self.guidance_key} instead and leave {unused} at 1"
            )
        if sampling.guidance_scale_2:
            raise ValueError(
                f"rollout.guidance_scale_2={sampling.guidance_scale_2}, but this model has no "
                "second component; set it to 0"
            )

    def grid(self, sampling: Sampling) -> TokenGrid:
        pixels = self.vae_factor * PATCH
        return TokenGrid(frames=1, rows=sampling.height // pixels, columns=sampling.width // pixels)

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        return self.grid(sampling).num_tokens, self.config["in_channels"] * PATCH**2

    def scheduler_config(self) -> dict[str, object]:
        """Read scheduler/scheduler_config.json: the defaults of code are another schedule."""
        return read_json(self.model_folder / "scheduler" / "scheduler_config.json")

    def static_shift(self) -> float:
        """Return the schedule's shift. Raises ValueError where it is none, or depends on size."""
        config = self.scheduler_config()
        shift = config.get("shift")
        is_number = isinstance(shift, int | float) and not isinstance(shift, bool)
        if config.get("use_dynamic_shifting") or not is_number or not shift > 0:  # type: ignore[operator]  # a number by then
            raise ValueError(
                f"{self.model_folder}/scheduler/scheduler_config.json has shift={shift!r} and "
                f"use_dynamic_shifting={config.get('use_dynamic_shifting')}; {self.title} has one "
                "shift for all sizes: fetch the file again"
            )
        return float(shift)  # type: ignore[arg-type]  # a number, as checked

    def last_sigma(self, num_steps: int) -> float:
        """Return where unshifted sigmas end before 0; by default at 1 / num_steps."""
        return 1 / max(num_steps, 1)

    def schedule(self, sampling: Sampling) -> Tensor:
        """Return [T+1] float32 sigmas. Raises ValueError without scheduler_config.json."""
        num_steps = sampling.num_inference_steps
        return static_sigmas(num_steps, shift=self.static_shift(), last=self.last_sigma(num_steps))

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        return static_shift(sigmas, shift=self.static_shift())

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if self.guidance_scale(sampling) > 1 else 1

    def num_text_tokens(self, conditioning: Conditioning) -> int:
        return self.text_tokens or super().num_text_tokens(conditioning)

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """Count tokens; num_text_tokens is nothing to a model that pads all texts to one length."""
        image, _ = self.latents_shape(sampling)
        return TokenCount(image=image, text=self.text_tokens or num_text_tokens)

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Count linear layers, attention and modulation; twice that under guidance."""
        count = self.token_count(sampling, num_text_tokens)
        num_tokens = count.image + count.text
        d = self.width
        # 2 operations a multiply-add. A block's linear layers have (4 + 2·mlp_ratio)·d² weights for
        # each token, attention is two products, and modulations have 12·d² weights for each sample.
        linears = (8 + 4 * self.mlp_ratio) * num_tokens * d**2
        one_pass = self.num_layers * (linears + 4 * num_tokens**2 * d + 24 * d**2)
        return float(one_pass * self.num_passes(self.components[0], sampling))
