"""Seconds that training waits for a checkpoint: written in the background, and in line.

    python tools/bench_checkpoint.py --gib 1 [--folder DISK]
    python tools/bench_checkpoint.py --params 5e9 --folder DISK

Builds the VeOmni engine for a Qwen-Image of about so many parameters with random weights, on one
GPU or the CPU, and makes an update, so that AdamW has moments. A parameter's state is 12 bytes.
Then it saves --repeat times each way and removes what it wrote. One JSON line:
in_line_s, background_s: how long the loop waits, medians; ratio: between them.
first_background_s: the first time, when the host's memory for the copy is taken.
written_s: from the save to the whole checkpoint on the disk.
update_s, update_beside_s: an update alone, and while a checkpoint is written.
DISK takes one checkpoint, the host's free memory must be twice as much.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from bench_engine import LOSS, synthetic_batch
from bench_machine import RECIPE, machine, tool_parser
from random_weights import write_random_transformer

from megadiff.checkpoint import background
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.config.load import load_config
from megadiff.engines import build_engine
from megadiff.engines.engine import Engine
from megadiff.models.registry import build_adapter
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.types import Progress, TrainBatch

ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_PARAMETER = 12  # a float32 weight and its two moments
WIDE = 1_000_000_000  # parameters from which on a block has the model's own width
HEADS = {True: 24, False: 4}
HEAD_DIM = 128
# of a block whose width is 1: attention 8, two feed-forwards of 8, two modulations of 6
BLOCK_FACTOR = 36


@dataclass(frozen=True)
class Bench:
    """Hold what is measured."""

    engine: Engine
    batch: TrainBatch
    folder: Path

    def update_s(self) -> float:
        begin = time.perf_counter()
        self.engine.update(self.batch, LOSS)
        if self.engine.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def saves(
        self, repeat: int, meanwhile: Callable[[], float]
    ) -> tuple[list[float], list[float], list[float]]:
        """Save so often. Return seconds until save() is back, until all is written, meanwhile()."""
        run = Checkpoints(self.folder, self.engine.config, self.engine.mesh)
        waited, written, beside = [], [], []
        for step in range(1, repeat + 1):
            begin = time.perf_counter()
            run.save(self.engine, Progress(step=step))
            waited.append(time.perf_counter() - begin)
            beside.append(meanwhile())
            run.settle()
            written.append(time.perf_counter() - begin)
            shutil.rmtree(run.folder)  # the disk need not hold two
        return waited, written, beside


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    num_parameters = options.params or options.gib * 2**30 / BYTES_PER_PARAMETER
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=options.folder) as scratch:
        bench = _prepare(Path(scratch), num_parameters)
        alone_s = median(bench.update_s() for _ in range(options.repeat + 1))
        with patch.object(background, "free_bytes", return_value=0):
            in_line, _, _ = bench.saves(options.repeat, float)
        waited, written, beside = bench.saves(options.repeat + 1, bench.update_s)
        snapshot = bench.engine.snapshot()

    first_s = waited.pop(0)
    line = {
        "gib": round(snapshot.num_bytes / 2**30, 2),
        "in_line_s": round(median(in_line), 3),
        "background_s": round(median(waited), 3),
        "ratio": round(median(in_line) / median(waited), 1),
        "first_background_s": round(first_s, 3),
        "written_s": round(median(written), 3),
        "update_s": round(alone_s, 3),
        "update_beside_s": round(median(beside), 3),
        **machine(),
    }
    print(json.dumps(line), flush=True)
    torch.distributed.destroy_process_group()
    return 0


def _prepare(scratch: Path, num_parameters: float) -> Bench:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = scratch / "model"
    heads = HEADS[num_parameters >= WIDE]
    num_layers = max(1, round(num_parameters / BLOCK_FACTOR / (heads * HEAD_DIM) ** 2))

    source = shutil.copytree(ROOT / "assets" / "qwen_image", scratch / "source")
    config_file = source / "transformer" / "config.json"
    shape = json.loads(config_file.read_text()) | {"num_attention_heads": heads}
    config_file.write_text(json.dumps(shape))
    write_random_transformer(source, model, device=device, num_layers=num_layers)

    overrides = f"model.path={model} run.device={device} engine.compile=false".split()
    config = load_config([str(ROOT / RECIPE), *overrides, "rollout.height=64", "rollout.width=64"])
    mesh = init_mesh(resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=1), device)
    engine = build_engine(config, mesh, build_adapter(model))
    batch = synthetic_batch(config, engine.adapter, mesh, rows=4, text_tokens=64)
    shutil.rmtree(model)  # the disk is the checkpoints' now
    return Bench(engine=engine, batch=batch, folder=scratch / "run")


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gib", type=float, default=0.0, help="of state, about")
    size.add_argument("--params", type=float, default=0.0, help="number of parameters, about")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
