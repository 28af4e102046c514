"""Measure an all-reduce over this host's GPUs: `python -m megadiff.doctor.links_probe N`.

Prints the bus bandwidth in GB/s, as nccl-tests count it: 2 (N - 1) / N · bytes / seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

NUM_BYTES = 256 << 20
SECONDS = 2.0
NUM_WARMUP = 3
BATCH = 5  # all-reduces between two looks at the clock
FILE = "bandwidth"


def run_rank(
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    num_bytes: int = NUM_BYTES,
    seconds: float = SECONDS,
) -> None:
    """Run one rank. Rank 0 writes the bandwidth into the folder. Collective."""
    is_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    tensor = torch.zeros(num_bytes // 4, device=device)
    for _ in range(NUM_WARMUP):
        dist.all_reduce(tensor)

    count = 0
    began = _now(is_gpu)
    taken = 0.0

    while taken < seconds:
        for _ in range(BATCH):
            dist.all_reduce(tensor)
        count += BATCH
        # the slowest rank's clock, so that all end together
        elapsed = torch.tensor(_now(is_gpu) - began, device=device)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        taken = float(elapsed)

    if rank == 0:
        bytes_per_s = count * num_bytes / taken
        gbs = 2 * (world_size - 1) / world_size * bytes_per_s / 1e9
        Path(folder, FILE).write_text(f"{gbs:.1f}", "utf-8")
    dist.destroy_process_group()


def _now(is_gpu: bool) -> float:
    if is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def main(world_size: int) -> None:
    """Spawn a rank on each GPU, and print what they got."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_rank, args=(world_size, folder, "nccl"), nprocs=world_size, join=True
        )
        sys.stdout.write(f"{Path(folder, FILE).read_text('utf-8')}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
