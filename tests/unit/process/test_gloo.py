"""All gloo groups of a process share a transport thread, and compute as before."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadiff.process.gloo import share_devices
from tests.distributed.ranks import run_ranks

NUM_GROUPS = 5


def _transport_threads() -> int:
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def _worker(folder: str, world_size: int, choice: str, num_threads: int) -> None:
    if choice:
        name, _, value = choice.partition("=")
        os.environ[name] = value
    share_devices()
    share_devices()
    store = dist.FileStore(f"{folder}/store", world_size)
    rank = int(os.environ.get("RANK", 0))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    groups = [dist.new_group(timeout=timedelta(seconds=9)) for _ in range(NUM_GROUPS)]
    # all at once, each with its own sum
    numbers = [torch.full((1000,), float(index + rank)) for index in range(NUM_GROUPS)]
    works = [dist.all_reduce(n, group=g, async_op=True) for n, g in zip(numbers, groups)]
    for index, (work, number) in enumerate(zip(works, numbers)):
        work.wait()
        assert torch.equal(
            number, torch.full((1000,), float(sum(range(index, index + world_size))))
        )
    assert _transport_threads() == num_threads
    dist.destroy_process_group(groups[0])
    dist.barrier(groups[1])


@pytest.mark.parametrize(
    ("world_size", "choice", "num_threads"),
    [
        (1, "", 1),
        (2, "", 1),
        (2, "GLOO_SOCKET_IFNAME=lo", 1),
        (2, "GLOO_DEVICE_TRANSPORT=TCP", NUM_GROUPS + 1),  # torch's own way
    ],
)
def test_groups_share_a_transport_thread(tmp_path, world_size, choice, num_threads):
    run_ranks(_worker, world_size, str(tmp_path), world_size, choice, num_threads)
