"""The 2-D path of the VAE gives the stock values, for images and beside videos."""

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage

from megadiff.models.qwen_image.vae import convolve_single_frames_in_2d


def _tiny_vae():
    torch.manual_seed(0)
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


@pytest.mark.parametrize("num_frames", [1, 2])
def test_decodes_and_encodes_as_the_stock_vae(num_frames):
    vae = _tiny_vae()
    latents = torch.randn(2, 16, num_frames, 4, 6)
    with torch.no_grad():
        images = vae.decode(latents).sample
        means = vae.encode(images).latent_dist.mean
        calls = _count_2d(vae)
        torch.testing.assert_close(vae.decode(latents).sample, images, atol=1e-5, rtol=0)
        torch.testing.assert_close(vae.encode(images).latent_dist.mean, means, atol=1e-5, rtol=0)
    assert calls["2d"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["video", "image"])
def test_a_decoder_of_images_is_one_graph(kind):
    """Qwen-Image's VAE of videos, and an AutoencoderKL: what compile_vae() compiles."""
    vae = _tiny_vae() if kind == "video" else AutoencoderKL(latent_channels=16).eval()
    latents = torch.randn(2, 16, 4, 6) if kind == "image" else torch.randn(2, 16, 1, 4, 6)
    with torch.no_grad():
        stock = vae.decode(latents).sample
        if kind == "video":
            convolve_single_frames_in_2d(vae)
        vae.decoder.compile(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(vae.decode(latents).sample, stock, atol=1e-5, rtol=0)


def _count_2d(vae):
    """Switch the fast path on and count how often it is taken."""
    convolve_single_frames_in_2d(vae)
    calls = {"2d": 0}
    for module in vae.modules():
        if type(module).__name__ == "QwenImageCausalConv3d":
            fast = module.forward

            def counted(x, cache_x=None, fast=fast):
                calls["2d"] += x.shape[2] == 1 and cache_x is None
                return fast(x, cache_x)

            module.forward = counted
    return calls
