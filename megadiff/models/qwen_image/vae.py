"""Make the video VAE of Qwen-Image fast for images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:  # imports all of diffusers' models
    from diffusers.models.autoencoders.vae import DecoderOutput


def convolve_single_frames_in_2d(vae: nn.Module) -> None:
    """Give the VAE's causal 3-D convolutions a 2-D path for images, and its decoder one as well.

    It is a third of the work and gives the same values: for one frame without a cache all temporal
    taps but the last see zero padding only. An image's decoder keeps no features for a next frame,
    so that all of it is one graph.
    """
    video_vae: Any = vae
    video_vae._decode = partial(_decode, vae, video_vae._decode)
    for module in vae.modules():
        if type(module).__name__ == "QwenImageCausalConv3d":
            module.forward = partial(_convolve, module, module.forward)


def _decode(
    vae: Any, stock: Callable[..., Any], z_BCTHW: Tensor, return_dict: bool = True
) -> DecoderOutput | tuple[Tensor]:
    if z_BCTHW.shape[2] != 1 or vae.use_tiling:
        return stock(z_BCTHW, return_dict=return_dict)

    image_BCTHW = vae.decoder(vae.post_quant_conv(z_BCTHW)).clamp(-1.0, 1.0)
    if not return_dict:
        return (image_BCTHW,)
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=image_BCTHW)


def _convolve(
    module: Any, stock: Callable[..., Tensor], x_BCTHW: Tensor, cache_x: Tensor | None = None
) -> Tensor:
    if x_BCTHW.shape[2] != 1 or cache_x is not None:
        return stock(x_BCTHW, cache_x)

    left, _, top, *_ = module._padding  # of width, height, time, each before and after
    frame_BCHW = functional.conv2d(
        x_BCTHW[:, :, 0],
        module.weight[:, :, -1],
        module.bias,
        stride=module.stride[1:],
        padding=(top, left),
    )
    return frame_BCHW.unsqueeze(2)
