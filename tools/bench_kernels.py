"""Time what a block of Qwen-Image computes around its matrix products, compiled.

    python tools/bench_kernels.py [--rows 16] [--tokens 1024]

Prints a table of microseconds: each part compiled for any size, for its own size, and for that
where torch takes the faster of two forms of a reduction (`multi_kernel`). What replicas take is in
megadiff/rollout/worker/compiled.py. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch._inductor.config
from bench_machine import gpu_name, tool_parser
from torch import Tensor
from torch.nn import functional

from megadiff.models.rotary import rotate_pairs
from megadiff.rollout.worker.fp8 import quantize_rows

WIDTH, HEADS, MLP = 3072, 24, 12288
CALLS = 20
WAYS = {  # name → (compiled for any size, multi_kernel)
    "any size": (True, 0),
    "fixed": (False, 0),
    "fixed, the faster form": (False, 1),
}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    parts = _parts(options.rows, options.tokens)
    print(f"{options.rows} rows of {options.tokens} tokens, {gpu_name()}")
    print(f"| µs | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for name, (function, arguments) in parts.items():
        cells = []
        for is_dynamic, multi_kernel in WAYS.values():
            torch._dynamo.reset()
            with torch._inductor.config.patch({"triton.multi_kernel": multi_kernel}):
                compiled = torch.compile(function, dynamic=is_dynamic)
                cells.append(f"{_microseconds(partial(compiled, *arguments)):.0f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


def _parts(rows: int, tokens: int) -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """Return name → (what is computed, of which tensors)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    stream = draw(rows, tokens, WIDTH)
    scale, shift, gate = (draw(rows, WIDTH) for _ in range(3))
    # query, key and value are one product's result
    query = draw(rows, tokens, 3 * WIDTH)[..., :WIDTH].unflatten(-1, (HEADS, -1))
    rotation = [draw(tokens, query.shape[-1] // 2) for _ in range(2)]
    wide = draw(rows, tokens, MLP)

    return {
        "norm, modulated": (_modulated, [stream, scale, shift]),
        "the same, then to FP8": (_to_fp8(_modulated), [stream, scale, shift]),
        "residual, then norm": (
            _residual_norm,
            [stream, gate, draw(rows, tokens, WIDTH), scale, shift],
        ),
        "norm of a head, rotated": (_rotated, [query, draw(query.shape[-1]), *rotation]),
        "GELU": (_gelu, [wide]),
        "GELU, then to FP8": (_to_fp8(_gelu), [wide]),
    }


def _modulated(x_RTC: Tensor, scale_RC: Tensor, shift_RC: Tensor) -> Tensor:
    norm_RTC = functional.layer_norm(x_RTC, x_RTC.shape[-1:], eps=1e-6)
    return norm_RTC * (1 + scale_RC.unsqueeze(1)) + shift_RC.unsqueeze(1)


def _residual_norm(
    x_RTC: Tensor, gate_RC: Tensor, y_RTC: Tensor, scale_RC: Tensor, shift_RC: Tensor
) -> tuple[Tensor, Tensor]:
    x_RTC = x_RTC + gate_RC.unsqueeze(1) * y_RTC
    return x_RTC, _modulated(x_RTC, scale_RC, shift_RC)


def _rotated(x_RTHD: Tensor, weight_D: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    norm_RTHD = functional.rms_norm(x_RTHD, x_RTHD.shape[-1:], weight_D, 1e-6)
    return rotate_pairs(norm_RTHD, cos_TP, sin_TP)


def _gelu(x_RTM: Tensor) -> Tensor:
    return functional.gelu(x_RTM, approximate="tanh")


def _to_fp8(function: Callable[..., Tensor]) -> Callable[..., object]:
    return lambda *arguments: quantize_rows(function(*arguments).flatten(0, 1))


def _microseconds(call: Callable[[], object]) -> float:
    """Return a call's own time, without that of compiling it."""
    for _ in range(CALLS):
        call()
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return 1e3 * do_bench(call)

    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("--rows", type=int, default=16, help="samples of a call")
    parser.add_argument("--tokens", type=int, default=1024, help="of an image; 512² has 1024")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
