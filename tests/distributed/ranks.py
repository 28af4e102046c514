"""Run a function on several gloo processes of this machine and report the first rank that fails, with its traceback."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

PRELOAD = [
    "torch._dynamo",  # imported by the first optimizer
    "diffusers.models.transformers.transformer_qwenimage",
    "diffusers.models.transformers.transformer_wan",
    "veomni.models.diffusers.qwen_image.qwen_image_transformer.modeling_qwen_image_transformer",
    "veomni.distributed.torch_parallelize",
    "megadiff.engines.veomni",
    "megadiff.parallel.tensor_parallel",
]


def run_ranks(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    start_method: str = "forkserver",  # "spawn" where CUDA is used, which does not survive a fork
) -> None:
    """Call worker(*args) on every rank, with torchrun's variables set; a world of one gets none, as without torchrun.

    worker: a module-level function; its results leave through files. Raises
    torch.multiprocessing.ProcessRaisedException with the traceback of a rank that fails, after the others were
    ended, and TimeoutError when they hang. Processes are forked from a server that has imported the heavy libraries
    once, but has run nothing.
    """
    os.environ["VEOMNI_VERBOSITY"] = "ERROR"  # before the server imports it
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = torch.multiprocessing.start_processes(
        _rank_main, (world_size, _free_port(), worker, args), nprocs=world_size, join=False, start_method=start_method
    )
    deadline = time.monotonic() + timeout_s
    while not context.join(timeout=0.2):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{worker.__name__} on {world_size} ranks did not end within {timeout_s} s")


def _rank_main(rank: int, world_size: int, port: int, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    worker(*args)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
