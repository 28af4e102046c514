"""Milliseconds and memory of decoding a call's images or videos by Qwen-Image's or Wan's VAE.

    python tools/bench_decode.py [--samples 16] [--size 512] [--rows 4 16] [--model FOLDER]
    python tools/bench_decode.py --model assets/wan22_t2v_a14b --frames 17 --size 480 832 \\
        --samples 2 --rows 1 2

Weights are random. Prints a line of JSON for the decoder as replicas run it, with its weights'
channels last, and compiled where the family compiles it; each for so many samples at once as --rows
says. gib is the peak beside the weights, planned_gib what `megadiff plan` counts for it,
reserved_gib what the allocator took for it. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import diffusers
import torch
from bench_machine import gpu_name, tool_parser
from torch import Tensor, nn

from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter

CALLS = 5  # that count, after as many that do not
GIB = 2**30


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    height, width = options.size * 2 if len(options.size) == 1 else options.size

    adapter = build_adapter(options.model)
    vae_class = getattr(diffusers, adapter.vae_class)
    config = vae_class.load_config(options.model / "vae")
    size = (height // adapter.spatial, width // adapter.spatial)
    frames = (options.frames - 1) // adapter.temporal + 1
    shape = (options.samples, config["z_dim"], frames, *size)
    latents = torch.randn(shape, device=device, dtype=torch.bfloat16)

    vae = vae_class.from_config(config).to(device, torch.bfloat16).eval()
    adapter.adapt_vae(vae)
    ways = ["eager", "channels_last"]
    if type(adapter).compile_vae is not ModelAdapter.compile_vae:
        ways.append("compiled")
    for way in ways:
        if way == "channels_last":
            set_memory_format(vae, torch.channels_last_3d)
        if way == "compiled":
            set_memory_format(vae, torch.contiguous_format)
            adapter.compile_vae(vae)
        for rows in options.rows:
            measured = decode(vae, latents, rows=rows, device=device)
            planned = adapter.decoding.num_bytes(
                rows, num_frames=options.frames, height=height, width=width, itemsize=2
            )
            line = {"way": way, "samples": options.samples, "rows": rows, **measured}
            line |= {"planned_gib": round(planned / GIB, 2), "gpu": gpu_name()}
            print(json.dumps(line), flush=True)
    return 0


def set_memory_format(vae: nn.Module, memory_format: torch.memory_format) -> None:
    """Lay out the weights of 3D convolutions so."""
    for parameter in vae.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


@torch.no_grad()
def decode(vae: nn.Module, latents: Tensor, *, rows: int, device: str) -> dict[str, float]:
    """Return the mean milliseconds of decoding all of them, and the peak GiB beside weights."""
    is_cuda = device == "cuda"
    start = before = reserved = 0.0
    if is_cuda:
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
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
    measured = {"ms": round(ms, 1)}
    if is_cuda:
        measured["gib"] = round((torch.cuda.max_memory_allocated() - before) / GIB, 2)
        measured["reserved_gib"] = round((torch.cuda.memory_reserved() - reserved) / GIB, 2)
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--size", type=int, nargs="+", default=[512], help="height and width")
    parser.add_argument("--frames", type=int, default=1, help="of each sample")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="samples a call")
    parser.add_argument("--model", type=Path, default=Path("assets/qwen_image"))
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
