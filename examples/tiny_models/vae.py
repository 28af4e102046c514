"""Shape a tiny VAE's decoder so that it paints: a random one paints near grey."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from examples.tiny_models.parts import seeded

# Of the image's mean colour, which the middle attention adds, as it looks everywhere alike. So an
# image has one dominant colour.
MEAN_WEIGHT = 0.5


@torch.no_grad()
def shape_decoder(vae: nn.Module, *, with_time: bool = False) -> None:
    """Make the decoder paint latent channels 0, 1, 2 as smooth red, green and blue blobs.

    Channels 0..6 inside the decoder hold (c, -c, 1) with c the three colours, in units of
    latents_std. Residual branches are zero, shortcuts the identity, convolutions a blur. The last
    RMS norm turns c into c·√8/√(2|c|² + 1): linear near grey, then saturating.
    silu(u) − silu(−u) = u brings it through the activation unchanged.
    with_time: of videos, so that the frames of one latent are alike; images never need it.
    A decoder whose upsampling blocks have a shortcut (TI2V-5B's), of equal widths throughout, is
    left with the shortcuts.
    """
    decoder = vae.decoder
    std = torch.tensor(vae.config.latents_std)
    mean = torch.tensor(vae.config.latents_mean)
    _set_pointwise(vae.post_quant_conv, torch.diag(1 / std))
    vae.post_quant_conv.bias.copy_(-mean / std)

    _shape_blocks(decoder, with_time=with_time)
    _set_blur(decoder.conv_in, _signed_colours(decoder.conv_in.out_channels, vae.config.z_dim))
    decoder.conv_in.bias[6] = 1.0

    to_rgb = _signed_colours(decoder.conv_out.in_channels, 3).T
    subpixels = decoder.conv_out.out_channels // 3  # neighbouring channels are those of one colour
    _set_pointwise(decoder.conv_out, to_rgb.repeat_interleave(subpixels, dim=0))


def build_kl_vae(*, scaling_factor: float, shift_factor: float, seed: int) -> AutoencoderKL:
    """Build a float32 AutoencoderKL, 8× down, 16 latent channels, as SD3's and FLUX's are.

    Its encoder is random, its decoder shaped.
    """
    with seeded(seed):
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            latent_channels=16,
            # one group: more of them would take the mean colour out of an image
            norm_num_groups=1,
            sample_size=64,
            scaling_factor=scaling_factor,
            shift_factor=shift_factor,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    shape_kl_decoder(vae)
    return vae


@torch.no_grad()
def shape_kl_decoder(vae: AutoencoderKL) -> None:
    """Make AutoencoderKL's decoder paint latent channels 0, 1, 2, as shape_decoder() does.

    Channels 0..7 inside the decoder hold (c, -c, 2, -2). Their mean is 0, so a group norm over all
    of them only divides: by the root mean square of the whole image.
    """
    decoder = vae.decoder
    gain = vae.config.scaling_factor
    colours = _signed_colours(decoder.conv_in.out_channels, vae.config.latent_channels)
    _set_blur(decoder.conv_in, gain * colours)
    # the shift's part of each colour
    offset = gain * vae.config.shift_factor
    decoder.conv_in.bias[:8] = torch.tensor([*[-offset] * 3, *[offset] * 3, 2.0, -2.0])

    for block in decoder.modules():
        kind = type(block).__name__
        if kind == "ResnetBlock2D":
            block.conv2.weight.zero_()
            block.conv2.bias.zero_()
            if block.conv_shortcut is not None:
                _set_pointwise(
                    block.conv_shortcut, torch.eye(block.out_channels, block.in_channels)
                )
        elif kind == "Upsample2D":
            _set_blur(block.conv, torch.eye(block.out_channels, block.channels))
        elif kind == "Attention":
            colours = torch.diag((torch.arange(block.query_dim) < 6).float())
            # it looks everywhere alike
            for linear, matrix_OI in (
                (block.to_q, torch.zeros_like(colours)),
                (block.to_k, torch.zeros_like(colours)),
                (block.to_v, colours),
                (block.to_out[0], MEAN_WEIGHT * colours),
            ):
                linear.weight.copy_(matrix_OI)
                linear.bias.zero_()

    _set_pointwise(decoder.conv_out, _signed_colours(decoder.conv_out.in_channels, 3).T)


def _signed_colours(num_channels: int, num_colours: int) -> Tensor:
    """Return [num_channels, num_colours]: channels c and 3 + c are colour c and its negative."""
    matrix = torch.zeros(num_channels, num_colours)
    for colour in range(3):
        matrix[colour, colour] = 1.0
        matrix[3 + colour, colour] = -1.0
    return matrix


def _shape_blocks(decoder: nn.Module, *, with_time: bool) -> None:
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
            _set_pointwise(block.proj, MEAN_WEIGHT * colours)
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
