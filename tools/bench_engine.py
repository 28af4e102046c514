"""Seconds of a training step, by engine and layout, at real size with random weights.

See docs/performance.md.

    python tools/bench_engine.py [CONFIG.yaml …] --gpus 2 --layers 12 --size 512 1024 \\
        --layout engine.backend=veomni --layout "engine.backend=megatron parallel.tp=2"

For every --layout (overrides of the config) and --size it starts torchrun on --gpus processes,
trains on synthetic samples and prints one JSON line: median seconds of Engine.update (forward,
backward, clipping, optimizer), peak memory, model TFLOP/s a GPU. Every layout trains on the same
--rows pairs of sample and window step; a dp rank takes its share of them in one microbatch, or with
--keep-microbatch in as many as the config says. --profile N: also a table of the N kernels that
rank 0 spent most time on in one more update. --rank-of N: one GPU as the first of N, without the
links between them (one_rank.py): seconds and memory of a layout before there are GPUs for it; for
FSDP2 over dp. Without a GPU it runs on the CPU (give --model a tiny pipeline folder). Exit code 1
when a layout failed; the others are still measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_machine import RECIPE, machine, tool_parser, with_default
from one_rank import check_alone, check_called, pretend
from random_weights import transformer_with_weights
from torch.autograd import DeviceType
from torch.profiler import profile

from megadiff.algorithms.flow_grpo import flow_grpo
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.engines import build_engine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from megadiff.train.sampling import sampling_of
from megadiff.types import TrainBatch

WARMUP = 2
LOSS = partial(flow_grpo, clip_range=(1e-5, 1e-5), adv_clip_max=5.0, kl_coef=0.0)


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    configs = with_default(options.config, [RECIPE, "engine.compile=false"])
    if options.worker:
        return _worker(configs, options)
    failed = False
    with tempfile.TemporaryDirectory(prefix="bench_engine_", dir=options.scratch) as scratch:
        model, count = transformer_with_weights(
            options.model, Path(scratch), num_layers=options.layers
        )
        if count is not None:
            print(json.dumps({"parameters": count, **machine()}), flush=True)
        for size in options.size:
            for layout in options.layout:
                failed |= not _launch(configs, model, size, layout, options)
    return int(failed)


def _launch(
    configs: list[str], model: Path, size: int, layout: str, options: argparse.Namespace
) -> bool:
    """Measure one layout in processes of its own; its line comes on their stdout."""
    overrides = [
        f"model.path={model}",
        f"rollout.height={size}",
        f"rollout.width={size}",
        *layout.split(),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.gpus}", __file__, *configs, *overrides, "--worker"]
    for name in ("rows", "repeat", "text_tokens", "profile", "rank_of"):
        command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    command += ["--keep-microbatch"] if options.keep_microbatch else []
    command += ["--layout", layout]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        told = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
        reason = " ".join(told[:1] or lines[-1:])
        print(json.dumps({"layout": layout, "size": size, "failed": reason[:300]}), flush=True)
    return done.returncode == 0


def _worker(arguments: list[str], options: argparse.Namespace) -> int:
    config = load_config(arguments)
    sizes = config.parallel
    if options.rank_of:
        _pretend(options.rank_of, config)
    layout = resolve_layout(
        dp=sizes.dp,
        sp=sizes.sp,
        tp=sizes.tp,
        dp_replicate=sizes.dp_replicate,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    mesh = init_mesh(layout, config.run.device)
    adapter = build_adapter(Path(config.model.path), config.model.family)
    if options.rows % mesh.dp:
        raise ValueError(
            f"--rows {options.rows} is not a multiple of parallel.dp={mesh.dp}; change one of them"
        )
    if not options.keep_microbatch:
        config.train.microbatch_size = options.rows // mesh.dp
    engine = build_engine(config, mesh, adapter)
    batch = synthetic_batch(
        config, adapter, mesh, rows=options.rows, text_tokens=options.text_tokens
    )
    if mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARMUP + options.repeat):
        _wait(mesh)
        start = time.perf_counter()
        figures = engine.update(batch, LOSS)
        _wait(mesh)
        seconds.append(time.perf_counter() - start)
    if options.rank_of:
        check_called()
    median = statistics.median(seconds[WARMUP:])
    # forward, and backward once or twice that: frozen weights have no gradient
    passes = 2 if config.lora.rank else 3
    flops = passes * options.rows * adapter.flops(sampling_of(config.rollout), options.text_tokens)
    line = {
        "layout": options.layout[0],
        "size": config.rollout.height,
        "rows": options.rows,
        "ranks": mesh.world_size,
        "update_s": round(median, 4),
        "tflops_per_gpu": round(flops / median / mesh.world_size / 1e12, 1),
        "peak_gib": _gib(torch.cuda.max_memory_allocated(), mesh),
        "reserved_gib": _gib(torch.cuda.max_memory_reserved(), mesh),  # fragments among it
        "grad_norm": figures["optim/grad_norm"],
    }
    if mesh.rank == 0:
        print(json.dumps(line), flush=True)
    if options.profile:
        kernels = kernel_table(lambda: engine.update(batch, LOSS), top=options.profile)
        if mesh.rank == 0:
            print(kernels, flush=True)
    torch.distributed.destroy_process_group()
    return 0


def _pretend(world_size: int, config: Config) -> None:
    num_ranks = int(os.environ["WORLD_SIZE"])
    sizes = {"WORLD_SIZE": num_ranks, "sp": config.parallel.sp, "tp": config.parallel.tp}
    check_alone(world_size, config.engine.backend, sizes)
    pretend(world_size)


def synthetic_batch(
    config: Config, adapter: ModelAdapter, mesh: Mesh, *, rows: int, text_tokens: int
) -> TrainBatch:
    """Return this dp rank's rows of a batch of `rows` samples with one window step each.

    The global batch is the same for every layout. Without old log_probs no row is clipped: rows
    without a gradient would be cheaper, as products with zeros draw less power.
    """
    sampling = sampling_of(config.rollout)
    generator = torch.Generator().manual_seed(0)
    shape = (rows, 2, *adapter.latents_shape(sampling))
    mine = slice(mesh.dp_rank, None, mesh.dp)
    latents_NSLC = torch.randn(shape, generator=generator)[mine]
    return TrainBatch(
        latents_NSLC=latents_NSLC,
        old_log_probs_NW=None,
        window_start_N=torch.ones(len(latents_NSLC), dtype=torch.int64),
        trained_steps_NK=torch.zeros(len(latents_NSLC), 1, dtype=torch.int64),
        advantages_N=torch.randn(rows, generator=generator)[mine],
        weights_N=torch.ones(len(latents_NSLC)),
        group_index_N=torch.zeros(len(latents_NSLC), dtype=torch.int64),
        conditioning={
            name: value
            if value.dtype == torch.bool
            else torch.randn(value.shape, generator=generator)
            for name, value in adapter.blank_text(text_tokens).items()
        },
        schedule=adapter.schedule(sampling),
        sampling=sampling,
        denominator=float(rows),
    )


def kernel_table(work: Callable[[], object], *, top: int) -> str:
    """Return a markdown table of the `top` kernels that work() spends most time in.

    On a CPU operators stand for kernels. Columns: ms, share of all kernels' time, number of calls.
    """
    with profile() as seen:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = [
        event
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if not torch.cuda.is_available():
        events = [event for event in seen.events() if event.name.startswith("aten::")]
    spent, calls = Counter[str](), Counter(event.name for event in events)
    for event in events:
        spent[event.name] += event.self_device_time_total or event.self_cpu_time_total
    total = sum(spent.values())
    lines = [f"| kernel ({total / 1000:.1f} ms of all) | ms | share | calls |", "|---|---|---|---|"]
    for name, us in spent.most_common(top):
        lines.append(f"| `{name[:110]}` | {us / 1000:.2f} | {us / total:.1%} | {calls[name]} |")
    return "\n".join(lines)


def _wait(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()


def _gib(num_bytes: int, mesh: Mesh) -> float | None:
    return round(num_bytes / 2**30, 2) if mesh.device.type == "cuda" else None


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "config", nargs="*", help=f"yaml files and key=value overrides (default {RECIPE})"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("assets/qwen_image"), help="config files are enough"
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="number of blocks; 0: the model's own"
    )
    parser.add_argument(
        "--gpus", type=int, default=max(1, torch.cuda.device_count()), help="processes"
    )
    parser.add_argument(
        "--size", type=int, nargs="+", default=[512], help="height and width in pixels"
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--keep-microbatch", action="store_true", help="train.microbatch_size as configured"
    )
    parser.add_argument(
        "--rank-of",
        type=int,
        default=0,
        metavar="N",
        help="as the first of N GPUs, without their links",
    )
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="show the N longest kernels; 0: none"
    )
    parser.add_argument(
        "--layout", action="append", required=True, help="key=value …, once for each layout"
    )
    parser.add_argument("--scratch", type=Path, help="folder for the random weights")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
