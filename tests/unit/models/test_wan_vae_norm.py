"""The norms of a replica's VAE are those of diffusers, bit for bit, and keep bfloat16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import nn

from megadiff.models.wan22.vae_norm import use_stock_norms

ROOT = Path(__file__).parents[3]


class OmniNorm(nn.Module):
    """What vllm-omni's RMSNormVAE holds; its forward is replaced."""

    def __init__(self, stock: WanRMS_norm) -> None:
        super().__init__()
        self.channel_first = stock.channel_first
        self.scale = stock.scale
        self.gamma = stock.gamma
        self.bias = stock.bias if isinstance(stock.bias, nn.Parameter) else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not replaced")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channel_first", [True, False])
def test_norms_are_diffusers_own(channel_first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    stock = WanRMS_norm(8, channel_first=channel_first, images=False, bias=bias)
    stock = stock.to(torch.bfloat16)
    nn.init.normal_(stock.gamma)
    if bias:
        nn.init.normal_(stock.bias)
    vae = nn.Sequential(OmniNorm(stock))
    use_stock_norms(vae, OmniNorm)

    shape = (2, 8, 3, 4, 4) if channel_first else (2, 3, 4, 4, 8)
    values = torch.randn(shape, dtype=torch.bfloat16)
    with torch.no_grad():
        answer = vae(values)
        assert answer.dtype == torch.bfloat16
        assert torch.equal(answer, stock(values))


LOOK = """
import torch
from megadiff.models.wan22 import pipeline
from diffusers.models.autoencoders import autoencoder_kl_wan
norm = autoencoder_kl_wan.WanRMS_norm(8, images=False).to(torch.bfloat16)
assert type(norm) is pipeline.RMSNormVAE, type(norm)
pipeline.use_stock_norms(torch.nn.Sequential(norm), pipeline.RMSNormVAE)
assert norm(torch.randn(1, 8, 2, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
assert norm.bias is None and norm.scale == 8 ** 0.5 and norm.channel_first
"""


@pytest.mark.slow
def test_vllm_omni_puts_this_class_in_diffusers_place() -> None:
    """In a process of its own, as it does so for all of it."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
