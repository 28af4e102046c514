"""Derive the adapter of a transformer that draws images from a few facts about the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megadiff.models.conditioning import Conditioning
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.guided_family import GuidedFamily
from megadiff.models.packing import pack, unpack
from megadiff.types import Sampling


class ImageFamily(GuidedFamily):
    """Adapt a model of one transformer, which makes images.

    A family gives what GuidedFamily names, with `one_pass()` in place of `packed_pass()`.

    mlp_ratio: as of all adapters. text_tokens: of every prompt, padding included, where the model
    pads all to one length; 0 where lengths differ. positions_per_side: of the model's table, in
    tokens; 0 for a model that computes as many as it needs.
    """

    mlp_ratio = 4.0
    # A CPU is faster where a call's pixels stay in its caches. A GPU takes 145 ms for 16 images of
    # 512², four at a time; all at once take 139 ms, but 12.8 GiB in place of 3.2.
    decoding = Decoding(pixels={"cpu": 2**16, "cuda": 2**20}, bytes_per_pixel=3328)
    vae_class = "AutoencoderKL"
    text_tokens = 0
    positions_per_side = 0

    def one_pass(
        self,
        transformer: Any,
        latents_BCHW: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the velocity [B, C, H, W] of one side of guidance. Arguments: of packed_pass()."""
        raise NotImplementedError

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        """Return one_pass() of unpacked latents, packed again."""
        latents_BCFHW = unpack(latents_BLC, self.grid(sampling))
        velocity_BCHW = self.one_pass(transformer, latents_BCFHW.squeeze(2), sigma_B, text)
        return pack(velocity_BCHW.unsqueeze(2))

    def compile_vae(self, vae: nn.Module) -> None:
        # all elementwise work between convolutions is fused: 50 ms for 16 images of 512², not 140
        vae.get_submodule("decoder").compile()

    def validate(self, sampling: Sampling) -> None:
        super().validate(sampling)
        if sampling.num_frames != 1:
            raise ValueError(
                f"rollout.num_frames={sampling.num_frames}, but {self.title} makes images; "
                "set it to 1"
            )
        grid = self.grid(sampling)
        if self.positions_per_side and max(grid.rows, grid.columns) > self.positions_per_side:
            pixels = self.positions_per_side * self.pixels_per_token
            raise ValueError(
                f"rollout.height={sampling.height} and rollout.width={sampling.width}, but this "
                f"model has positions for {pixels} pixels a side; set both to {pixels} or less"
            )

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
