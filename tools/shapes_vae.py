"""Training the tiny VAE of assets/shapes: Qwen-Image's architecture at base width 16, on generated
64×64 images.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor, nn

from examples.shapes.verifier import verify
from examples.shapes.world import parse, sample_images
from megadiff.models.qwen_image.vae import convolve_single_frames_in_2d

logger = logging.getLogger(__name__)
DATA_SEED, CHECK_SEED = 1, 2
KL_WEIGHT = 3e-4
START_LOG_VARIANCE = -4.0  # a default start drowns the latents in posterior noise
WARMUP_STEPS = 200


def train_vae(
    *, num_images: int, num_steps: int, batch_size: int, peak_lr: float
) -> AutoencoderKLQwenImage:
    """Return a float32 VAE on the CPU with its latents' mean and std in its config.

    Logs how many reconstructions verify.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    pixels, _ = sample_images(num_images, seed=DATA_SEED)
    images_NCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device)
    logger.info("%d images", num_images)
    vae = AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).to(device)
    stock_forwards = {module: module.forward for module in vae.modules()}
    convolve_single_frames_in_2d(vae)
    with torch.no_grad():
        vae.quant_conv.bias[vae.config.z_dim :] += START_LOG_VARIANCE
    _optimise(vae, images_NCHW, num_steps=num_steps, batch_size=batch_size, peak_lr=peak_lr)
    _drop_unused_taps(vae)
    # as it is stored, so that its statistics and checks are those of the file
    vae.to(torch.bfloat16).float()
    _measure_latents(vae, images_NCHW[:8192])
    _check_reconstructions(vae, num_images=min(num_images, 1000))
    for module, forward in stock_forwards.items():
        module.forward = forward
    return vae.cpu()


def encode(vae: AutoencoderKLQwenImage, images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Encode uint8 images as mean and log-variance of their latents, [N, 16, H/8, W/8] each."""
    moments = vae.quant_conv(vae.encoder(to_float(images_NCHW).unsqueeze(2)))[:, :, 0]
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, log_variance.clamp(-20, 5)


def decode(vae: AutoencoderKLQwenImage, latents_NCHW: Tensor) -> Tensor:
    """Decode latents as the encoder gives them to images in about [-1, 1]."""
    return vae.decoder(vae.post_quant_conv(latents_NCHW.unsqueeze(2)))[:, :, 0]


def to_float(images_NCHW: Tensor) -> Tensor:
    return images_NCHW.float() / 127.5 - 1


def _optimise(
    vae: AutoencoderKLQwenImage,
    images_NCHW: Tensor,
    *,
    num_steps: int,
    batch_size: int,
    peak_lr: float,
) -> None:
    """Train with AdamW, cosine to 2 %.

    On a GPU a step is one CUDA graph: its few hundred kernels are small.
    """
    device = images_NCHW.device
    on_gpu = device.type == "cuda"
    parameters = list(vae.parameters())
    lr = torch.tensor(0.0, device=device) if on_gpu else 0.0
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=True, capturable=on_gpu
    )
    batch = torch.zeros((batch_size, *images_NCHW.shape[1:]), dtype=torch.uint8, device=device)

    def fill() -> None:
        batch.copy_(images_NCHW[torch.randint(len(images_NCHW), (batch_size,), device=device)])

    def step() -> tuple[Tensor, Tensor]:
        mean, log_variance = encode(vae, batch)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = decode(vae, sample) - to_float(batch)
        reconstruction = error.abs().mean() + error.square().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        (reconstruction + KL_WEIGHT * kl).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return reconstruction.detach(), kl.detach()

    run = _as_graph(step, fill) if on_gpu else step
    start = time.perf_counter()
    for index in range(num_steps):
        cosine = 0.5 + 0.5 * float(np.cos(np.pi * index / num_steps))
        rate = peak_lr * min(1.0, (index + 1) / WARMUP_STEPS) * max(0.02, cosine)
        for group in optimizer.param_groups:
            if on_gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        fill()
        losses = run()
        if (index + 1) % 1000 == 0 or index + 1 == num_steps:
            reconstruction, kl = (float(value) for value in losses)
            seconds = time.perf_counter() - start
            logger.info(
                "step %d: reconstruction %.4f, kl %.2f, %.0f s",
                index + 1,
                reconstruction,
                kl,
                seconds,
            )


def _as_graph(
    step: Callable[[], tuple[Tensor, Tensor]], fill: Callable[[], None]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Capture the step as a CUDA graph.

    A few plain ones come first, at learning rate 0, that allocate all it needs.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fill()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = step()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return losses

    return replay


@torch.no_grad()
def _drop_unused_taps(vae: AutoencoderKLQwenImage) -> None:
    """Zero the temporal taps that an image never reaches: they compress away."""
    for module in vae.modules():
        if type(module).__name__ == "QwenImageCausalConv3d" and module.weight.shape[2] == 3:
            module.weight[:, :, :2] = 0


@torch.no_grad()
def _measure_latents(vae: AutoencoderKLQwenImage, images_NCHW: Tensor) -> None:
    latents = torch.cat([encode(vae, part)[0] for part in images_NCHW.split(512)])
    mean, std = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    vae.register_to_config(
        latents_mean=[round(value, 4) for value in mean.tolist()],
        latents_std=[round(value, 4) for value in std.tolist()],
    )


@torch.no_grad()
def _check_reconstructions(vae: AutoencoderKLQwenImage, *, num_images: int) -> None:
    pixels, texts = sample_images(num_images, seed=CHECK_SEED)
    images_NCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(next(vae.parameters()).device)
    decoded = torch.cat([decode(vae, encode(vae, part)[0]) for part in images_NCHW.split(256)])
    colours_NCHW = ((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    rounded = colours_NCHW.permute(0, 2, 3, 1).cpu().numpy()
    psnr = 10 * np.log10(255**2 / np.square(rounded.astype(np.float32) - pixels).mean())
    verified = [
        verify(image, parse(text)).strict for image, text in zip(rounded, texts, strict=True)
    ]
    logger.info(
        "reconstructions: PSNR %.1f dB, %.1f %% of %d verify",
        psnr,
        100 * np.mean(verified),
        num_images,
    )
