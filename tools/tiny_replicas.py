"""Replicas of a tiny model for faults in pushes, forked from a process that has their imports."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import faulty_worker
from forked import Forked
from sync_injector import Injector

# What a replica imports: 14 s of a core.
IMPORTS = (
    "vllm_omni.entrypoints.async_omni",
    "vllm_omni.entrypoints.openai.api_server",
    "vllm_omni.diffusion.diffusion_engine",
    "megadiff.models.qwen_image.pipeline",
    "megadiff.rollout.server.routes",
)
PAIR = "pair"
START_TIMEOUT_S = 900.0


def make_model(folder: Path) -> None:
    """Write a tiny model in a fork: torch's threads would not survive the forks that follow."""

    def make() -> int:
        from examples.tiny_models.qwen_image import write_tiny_pipeline

        write_tiny_pipeline(folder)
        return 0

    made = Forked(make, folder.with_suffix(".log"))
    if made.wait():
        raise RuntimeError(made.log.read_text()[-3000:])


def stop(replica: Forked) -> None:
    """End a replica and wait until it is gone."""
    if replica.poll() is None:
        os.kill(replica.pid, signal.SIGTERM)
    replica.wait()


def start_replicas(model: Path, folder: Path, injector: Injector, stack: ExitStack) -> list[str]:
    """Start two replicas of one worker and PAIR of two; return their addresses in this order."""
    command = [str(injector.fault_file), str(model), "--dtype", "float32", "--device", "cpu"]
    command += ["--port", "0", "--registry", str(folder / "registry")]
    command += ["--weights", str(injector.folder), "--parent-pid", str(os.getpid())]
    replicas = {}
    for name, own in (("replica_0", []), ("replica_1", []), (PAIR, ["--tp", "2"])):
        arguments = [*command, "--name", name, *own]
        serve = partial(faulty_worker.serve, arguments)
        replicas[name] = Forked(serve, folder / f"{name}.log")
        stack.callback(stop, replicas[name])

    deadline = time.monotonic() + START_TIMEOUT_S
    while len(list((folder / "registry").glob("*.json"))) < len(replicas):
        for replica in replicas.values():
            if replica.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(replica.log.read_text()[-3000:])
        time.sleep(0.1)
    entries = [json.loads((folder / "registry" / f"{name}.json").read_text()) for name in replicas]
    return [entry["url"] for entry in entries]
