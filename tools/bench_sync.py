"""Seconds of a weight push to a real replica, by transport. See docs/sync.md.

    python tools/bench_sync.py [--transport http shm nccl disk] [--gpu 0] [--layers N] \\
        [--bucket-mib 512] [--lora-rank 64]

Starts `megadiff serve` on --gpu (0: the trainer's own GPU, 1: another; no matter on a CPU) and
pushes random weights that lie on the trainer's device to it, --repeat times for each transport
after a first push that is told apart, as it opens groups and memory. A model folder that holds
configs only (assets/qwen_image) is first filled with random weights in --scratch: 55 GB of disk at
full size, less with --layers and --text-layers. Prints a line of JSON for every transport, and a
table: seconds (median), GiB/s, where they went. commit is the replica's own verification and the
only part that waits for nothing else; fingerprint is the trainer's, computed while buckets travel.
Every push is verified. Exit code 1 when a transport failed; the others are still measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from bench_machine import add_depths, machine, tool_parser
from bench_replica import served_model, start_replica
from torch import Tensor
from two_policies import sync_without_engine

from megadiff.config.schema import LoraConfig
from megadiff.engines.gathering import runs
from megadiff.models.registry import build_adapter
from megadiff.parallel.lora import lora_spec
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.bucket import Bucket
from megadiff.tensors.lora_names import lora_manifest
from megadiff.tensors.manifest import Manifest, folder_manifest
from megadiff.types import DTYPES, LoraSpec


class RandomSource:
    """Random weights on a device, handed out as an engine does: every tensor a copy, in buckets.

    Each version differs.
    """

    def __init__(self, manifest: Manifest, lora: LoraSpec | None, device: torch.device) -> None:
        self.lora, self.version = lora, 0
        # every version is another in all components
        self.changed = {name.partition(".")[0] for name in manifest}
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._tensors = self._random(manifest)
        self._lora_tensors = self._random(lora_manifest(lora, manifest)) if lora else {}

    def _random(self, manifest: Manifest) -> dict[str, Tensor]:
        settings = {"generator": self._generator, "device": self._device}
        return {
            name: 0.02 * torch.randn(row["shape"], dtype=DTYPES[row["dtype"]], **settings)
            for name, row in manifest.items()
        }

    def mark_pushed(self) -> None: ...

    def named_weights(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]:
        return self._buckets(self._tensors, bucket_bytes)

    def named_lora(self, bucket_bytes: int, components: Collection[str]) -> Iterator[Bucket]:
        return self._buckets(self._lora_tensors, bucket_bytes)

    def _buckets(self, tensors: dict[str, Tensor], bucket_bytes: int) -> Iterator[Bucket]:
        for names in runs({name: tensor.nbytes for name, tensor in tensors.items()}, bucket_bytes):
            bucket = [(name, tensors[name].clone()) for name in names]
            for _, tensor in bucket:
                tensor.view(-1)[0] = self.version
            yield bucket


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    layout = resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=1)
    mesh = init_mesh(layout, options.device)
    rows: list[dict] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench_sync_", dir=options.scratch) as scratch,
        ExitStack() as stack,
    ):
        sizes = {"layers": options.layers, "text_layers": options.text_layers}
        model = served_model(options.model, Path(scratch), device=str(mesh.device), **sizes)
        _, client = start_replica(
            model,
            Path(scratch),
            stack,
            dtype=options.dtype,
            device=mesh.device.type,
            gpus=tuple(range(options.gpu, options.gpu + options.tp)),
            tp=options.tp,
            weights=Path(scratch) / "weights",
        )
        fleet = stack.enter_context(Fleet([client], batch_size=1))
        adapter = build_adapter(model)
        manifest = folder_manifest(
            model, adapter.components, dtype=options.dtype, plan=adapter.plan
        )
        names = dict.fromkeys(name.partition(".")[2] for name in manifest)
        spec = lora_spec(LoraConfig(rank=options.lora_rank), adapter.plan, names)
        _show(machine())
        for lora in [None, spec] if spec else [None]:
            source = RandomSource(manifest, lora, mesh.device)
            for transport in options.transport:
                rows.append(
                    _measured(
                        transport, source, fleet, manifest, options, mesh, Path(scratch) / "weights"
                    )
                )
                _show(rows[-1])
    sys.stdout.write(table(rows))
    return int(any("failed" in row for row in rows))


def _measured(
    transport: str,
    source: RandomSource,
    fleet: Fleet,
    manifest: Manifest,
    options: argparse.Namespace,
    mesh: Mesh,
    folder: Path,
) -> dict:
    """Return one row: a first push and --repeat further ones."""
    row = {
        "transport": transport,
        "what": "lora" if source.lora else "all weights",
        "replica_gpu": options.gpu,
    }
    try:
        sync = sync_without_engine(
            source,
            fleet,
            transport,
            manifest=manifest,
            mesh=mesh,
            folder=folder,
            bucket_bytes=options.bucket_mib * 2**20,
        )
        pushes = []
        for _ in range(1 + options.repeat):
            source.version += 1
            start = time.perf_counter()
            gib = sync.push(source.version)["sync/gib"]
            pushes.append({"seconds": time.perf_counter() - start, "gib": gib, **sync.seconds})
        sync.close()
    except (RuntimeError, ValueError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}"[:500]}
    later = {key: statistics.median(push[key] for push in pushes[1:]) for key in pushes[0]}
    row |= {
        "way": sync.transport.name,
        "workers": options.tp,
        "first_s": round(pushes[0]["seconds"], 4),
    }
    row |= {key: round(value, 4) for key, value in later.items()}
    return row | {
        "gib_per_s": float(f"{later['gib'] / later['seconds']:.3g}"),
        "commit_share": round(later["commit"] / later["seconds"], 4),
    }


def table(rows: list[dict]) -> str:
    """Return a markdown table, a line for each measurement."""
    columns = {
        "transport": "transport",
        "way": "way",
        "what": "what",
        "gib": "GiB",
        "first_s": "first s",
        "seconds": "s",
        "gib_per_s": "GiB/s",
        "gather": "gather s",
        "send": "wait s",
        "fingerprint": "fingerprint s",
        "commit": "commit s",
        "commit_share": "commit share",
    }
    lines = ["", f"| {' | '.join(columns.values())} |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append(
            f"| {' | '.join(str(row.get(key, row.get('failed', ''))) for key in columns)} |"
        )
    return "\n".join(lines) + "\n"


def _show(row: dict) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("--transport", nargs="+", default=["http", "shm", "nccl", "disk"])
    parser.add_argument(
        "--model", type=Path, default=Path("assets/qwen_image"), help="config files are enough"
    )
    add_depths(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--gpu", type=int, default=0, help="first GPU of the replica; the trainer has GPU 0"
    )
    parser.add_argument("--tp", type=int, default=1, help="workers of the replica")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="also push LoRA tensors of this rank alone"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="folder for random weights and transport disk")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
