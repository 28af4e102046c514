"""Print GpuFacts as JSON: `python -m megadiff.doctor.gpu_probe`, in a process that may hang."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from multiprocessing.queues import Queue
from queue import Empty

import torch
import torch.multiprocessing
from torch import Tensor

from megadiff.doctor.gpu_facts import GpuDevice, GpuFacts

IPC_TIMEOUT_S = 30.0
IPC_SUM = 28.0  # of 0 to 7


def probe() -> GpuFacts:
    """Ask CUDA for devices, peer access and IPC."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return GpuFacts(cuda_error=str(error).splitlines()[0])
    devices = tuple(_device(index) for index in range(torch.cuda.device_count()))
    pairs = [(first, second) for first in range(len(devices)) for second in range(len(devices))]
    without_peer = tuple(
        (first, second)
        for first, second in pairs
        if first != second and not torch.cuda.can_device_access_peer(first, second)
    )

    return GpuFacts(devices=devices, without_peer=without_peer, ipc_error=ipc_error())


def _device(index: int) -> GpuDevice:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return GpuDevice(
        name=properties.name,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        capability=f"{properties.major}.{properties.minor}",
    )


def ipc_error() -> str:
    """Let another process read a tensor of ours, as a replica reads a bucket; say why it cannot."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    tensor = torch.arange(8, dtype=torch.float32, device="cuda:0")
    reader = context.Process(target=_read, args=(tensor, answers), daemon=True)
    reader.start()

    try:
        answer = answers.get(timeout=IPC_TIMEOUT_S)
    except Empty:
        return f"no answer within {IPC_TIMEOUT_S:g} s (exit code {reader.exitcode})"
    finally:
        reader.join(1.0)

    return "" if answer == IPC_SUM else str(answer)


def _read(tensor: Tensor, answers: Queue) -> None:
    try:
        answers.put(float(tensor.sum()))
    except RuntimeError as error:
        answers.put(str(error).splitlines()[0])


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(asdict(probe()))}\n")
