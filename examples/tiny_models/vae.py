"""Shape a tiny VAE's decoder so that it paints: a random one paints near grey."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def shape_decoder(
    vae: nn.Module,
    *,
    scale: float = 1.0,
    mean_weight: float = 0.5,
    bias: float = 1.0,
    with_time: bool = False,
) -> None:
    """Make the decoder paint latent channels 0, 1, 2 as smooth red, green and blue blobs.

    Channels 0..6 inside the decoder hold (c, -c, bias) with c the three colours. Residual branches
    are zero, shortcuts the identity, convolutions a blur. The last RMS norm turns c into
    c·√8/√(2|c|² + bias²): linear near grey, then saturating. silu(u) − silu(−u) = u brings it
    through the activation unchanged.
    scale: gain of one latent unit, which is latents_std.
    mean_weight: of the image's mean colour, which the middle attention adds, as it looks everywhere
    alike. So an image has one dominant colour.
    with_time: of videos, so that the frames of one latent are alike; images never need it.
    A decoder whose upsampling blocks have a shortcut (TI2V-5B's), of equal widths throughout, is
    left with the shortcuts.
    """
    decoder = vae.decoder
    std = torch.tensor(vae.config.latents_std)
    mean = torch.tensor(vae.config.latents_mean)
    _set_pointwise(vae.post_quant_conv, torch.diag(1 / std))
    vae.post_quant_conv.bias.copy_(-mean / std)

    _shape_blocks(decoder, mean_weight, with_time=with_time)

    to_colours = torch.zeros(decoder.conv_in.out_channels, vae.config.z_dim)
    for colour in range(3):
        to_colours[colour, colour] = scale
        to_colours[3 + colour, colour] = -scale
    _set_blur(decoder.conv_in, to_colours)
    decoder.conv_in.bias[6] = bias

    to_rgb = torch.zeros(3, decoder.conv_out.in_channels)
    for colour in range(3):
        to_rgb[colour, colour] = 1.0
        to_rgb[colour, 3 + colour] = -1.0
    subpixels = decoder.conv_out.out_channels // 3  # neighbouring channels are those of one colour
    _set_pointwise(decoder.conv_out, to_rgb.repeat_interleave(subpixels, dim=0))


def _shape_blocks(decoder: nn.Module, mean_weight: float, *, with_time: bool) -> None:
    """Make every block pass the colours on, and the middle attention add their mean."""
    for block in decoder.modules():
        kind = type(block).__name__.removeprefix("QwenImage").removeprefix("Wan")
        if kind == "ResidualBlock":
            block.conv2.weight.zero_()
            block.conv2.bias.zero_()
            if not isinstance(block.conv_shortcut, nn.Identity):
                _set_pointwise(block.conv_shortcut, torch.eye(block.out_dim, block.in_dim))
        elif kind == "Resample":
            conv = block.resample[1]
            _set_blur(conv, torch.eye(conv.out_channels, conv.in_channels))
            if with_time and hasattr(block, "time_conv"):
                # Its channels are those of the first and of the second frame.
                _set_pointwise(block.time_conv, torch.eye(block.dim).repeat(2, 1))
        elif kind == "AttentionBlock":
            colours = torch.diag((torch.arange(block.dim) < 6).float())
            no_query_no_key = torch.zeros(2 * block.dim, block.dim)
            _set_pointwise(block.to_qkv, torch.cat([no_query_no_key, colours]))
            _set_pointwise(block.proj, mean_weight * colours)
    for block in decoder.up_blocks:
        if getattr(block, "avg_shortcut", None) is not None:
            block.upsampler.resample[1].weight.zero_()


def _set_pointwise(conv: nn.Module, matrix_OI: Tensor) -> None:
    """Make a convolution apply matrix_OI to each pixel of the newest frame alone, without bias."""
    _set_kernel(conv, matrix_OI, torch.tensor([0.0, 1.0, 0.0]))


def _set_blur(conv: nn.Module, matrix_OI: Tensor) -> None:
    """Make a 3×3 convolution apply matrix_OI and the binomial blur."""
    _set_kernel(conv, matrix_OI, torch.tensor([0.25, 0.5, 0.25]))


def _set_kernel(conv: nn.Module, matrix_OI: Tensor, taps_3: Tensor) -> None:
    kernel_HW = torch.outer(taps_3, taps_3) if conv.weight.shape[-1] == 3 else torch.ones(1, 1)
    newest = conv.weight if conv.weight.ndim == 4 else conv.weight[:, :, -1]
    conv.weight.zero_()
    newest.copy_(matrix_OI[:, :, None, None] * kernel_HW)
    conv.bias.zero_()
