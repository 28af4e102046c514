"""Two ranks wait for each other for good, and load a compiled kernel meanwhile: what they hold can
be copied all the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadiff.engines import stuck
from megadiff.engines.gate import StepGate
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.gpu
KERNEL = "__global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }"
MEBI = 2**20


def test_a_copy_ends_beside_collectives_that_nobody_joins(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} visible")
    run_ranks(copy_while_stuck, 2, tmp_path, timeout_s=120.0, start_method="spawn")
    for rank in range(2):
        row = json.loads((tmp_path / f"{rank}.json").read_text())
        assert row["sum"] == sum(range(1000)), row
        # else nothing was stuck, and the test shows nothing
        assert row["seconds"] > stuck.STUCK_S / 2, row


def copy_while_stuck(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=100))
    groups = [dist.group.WORLD, dist.new_group()]
    values = torch.ones(MEBI, device="cuda")
    gate = StepGate(torch.device("cuda", rank))
    kept = torch.arange(1000, device="cuda", dtype=torch.float32)
    for group in groups:
        dist.all_reduce(values, group=group)
    torch.cuda.synchronize()
    dist.barrier(group=dist.new_group(backend="gloo"))

    dist.all_reduce(values, group=groups[rank])  # the other rank never joins this one

    def load() -> None:
        torch.cuda.set_device(rank)  # a thread begins on device 0
        torch.cuda._compile_kernel(KERNEL, "add_one")

    threading.Thread(target=load, daemon=True).start()
    time.sleep(3.0)

    def save() -> None:
        began_s = time.monotonic()
        with gate.after_changes():
            total = int(kept.to("cpu").sum())
        row = {"sum": total, "seconds": time.monotonic() - began_s}
        (folder / f"{rank}.json").write_text(json.dumps(row))

    saving = threading.Thread(target=save)  # which has not used the GPU before, as a rescue's
    saving.start()
    saving.join()
    os._exit(0)  # its groups are of no use any more
