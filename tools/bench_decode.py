"""Milliseconds and memory of decoding a call's images by Qwen-Image's VAE, random weights.

    python tools/bench_decode.py [--images 16] [--size 512] [--rows 4 16] [--model FOLDER]

Prints a line of JSON for the decoder as replicas run it, eager and compiled, and for so many images
at once as --rows says. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from bench_machine import gpu_name, tool_parser
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from megadiff.models.registry import build_adapter

CALLS = 5  # that count, after as many that do not
PIXELS_PER_LATENT = 8  # on a side


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoencoderKLQwenImage.load_config(options.model / "vae")
    side = options.size // PIXELS_PER_LATENT
    shape = (options.images, config["z_dim"], 1, side, side)
    latents = torch.randn(shape, device=device, dtype=torch.bfloat16)

    vae = AutoencoderKLQwenImage.from_config(config).to(device, torch.bfloat16).eval()
    adapter = build_adapter(options.model)
    adapter.adapt_vae(vae)
    for way in ("eager", "compiled"):
        if way == "compiled":
            adapter.compile_vae(vae)
        for rows in options.rows:
            measured = decode(vae, latents, rows=rows, device=device)
            line = {"way": way, "images": options.images, "rows": rows, **measured}
            print(json.dumps(line | {"gpu": gpu_name()}), flush=True)
    return 0


@torch.no_grad()
def decode(
    vae: AutoencoderKLQwenImage, latents: Tensor, *, rows: int, device: str
) -> dict[str, float]:
    """Return the mean milliseconds of decoding all of them, and the peak GiB beside weights."""
    is_cuda = device == "cuda"
    start = before = 0.0
    for call in range(2 * CALLS):
        if call == CALLS:
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
        for part in latents.split(rows):
            vae.decode(part, return_dict=False)
    if is_cuda:
        torch.cuda.synchronize()
    ms = 1000 * (time.perf_counter() - start) / CALLS
    peak = torch.cuda.max_memory_allocated() - before if is_cuda else 0.0
    return {"ms": round(ms, 1), "gib": round(peak / 2**30, 2)}


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--size", type=int, default=512, help="pixels on a side")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="images a call")
    parser.add_argument("--model", type=Path, default=Path("assets/qwen_image"))
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
