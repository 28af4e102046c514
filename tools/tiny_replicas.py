"""Replicas of a tiny model for faults in pushes, forked from a process that has their imports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import faulty_worker
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


class Forked:
    """A call in a fork of this process, which imports for all of them once and has run nothing.

    run: returns the exit code.
    """

    def __init__(self, run: Callable[[], int], log: Path) -> None:
        self.log = log
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            code = run()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            # It must end here: the trials' own stack is below, with its clean-up.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        assert self.code is not None
        return self.code

    def stop(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        self.wait()


def make_model(folder: Path) -> None:
    """Write a tiny model in a fork: torch's threads would not survive the forks that follow."""

    def make() -> int:
        from examples.tiny_models.qwen_image import write_tiny_pipeline

        write_tiny_pipeline(folder)
        return 0

    made = Forked(make, folder.with_suffix(".log"))
    if made.wait():
        raise RuntimeError(made.log.read_text()[-3000:])


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
        stack.callback(replicas[name].stop)

    deadline = time.monotonic() + START_TIMEOUT_S
    while len(list((folder / "registry").glob("*.json"))) < len(replicas):
        for replica in replicas.values():
            if replica.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(replica.log.read_text()[-3000:])
        time.sleep(0.1)
    entries = [json.loads((folder / "registry" / f"{name}.json").read_text()) for name in replicas]
    return [entry["url"] for entry in entries]
