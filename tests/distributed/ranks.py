"""Processes that have their imports behind them: a function on several gloo ranks of this machine,
and a command as a user gives it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.multiprocessing

from megadiff.cli.console import leave, show_crashes

PORTS = range(
    20_000, 32_000
)  # below those that the system gives out, so that no one else takes one between probe and use


def run_ranks(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    timeout_s: float = 300.0,
    start_method: str = "forkserver",  # "spawn" where CUDA is used, which does not survive a fork
) -> None:
    """Call worker(*args) on every rank, with torchrun's variables set; a world of one gets none, as
    without torchrun.

    worker: a module-level function; its results leave through files. Raises
    torch.multiprocessing.ProcessRaisedException with the traceback of a rank that fails, after the
    others were ended, and TimeoutError when they hang. Processes are forked from a server that has
    imported the heavy libraries once, but has run nothing.
    """
    _prepare_server()
    context = torch.multiprocessing.start_processes(
        _rank_main,
        (world_size, _free_port(), worker, args),
        nprocs=world_size,
        join=False,
        start_method=start_method,
    )
    deadline = time.monotonic() + timeout_s
    while not context.join(timeout=0.2):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(
                f"{worker.__name__} on {world_size} ranks did not end within {timeout_s} s"
            )


def _rank_main(
    rank: int, world_size: int, port: int, worker: Callable[..., None], args: tuple[Any, ...]
) -> None:
    show_crashes()
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
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {PORTS} is free")


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code (of a signal, minus its number), and what it wrote."""

    code: int
    stdout: str
    stderr: str


class Command:
    """A process in `folder` whose way out is `leave(main(arguments))`, without the 4 to 8 s of its
    imports, and with what tests use of subprocess.Popen.

    out, err: files for what it writes. environment: all of it. prepare: called in it first. main
    and prepare: of a module.
    """

    def __init__(
        self,
        main: Callable[[list[str]], int],
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        out: Path,
        err: Path,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        _prepare_server()
        self.arguments = list(arguments)
        self.err = err
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_command_main,
            args=(main, self.arguments, folder, dict(environment), prepare, out, err),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Return its exit code. Raises TimeoutError, after it was killed, when it hangs."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self.kill()
            self._process.join()
            written = self.err.read_text("utf-8")[-3000:]
            raise TimeoutError(f"{self.arguments} did not end within {timeout_s} s:\n{written}")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    main: Callable[[list[str]], int],
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    prepare: Callable[[], object] | None = None,
    timeout_s: float = 300.0,
) -> Done:
    """Return what a Command leaves. Raises TimeoutError when it hangs."""
    with tempfile.TemporaryDirectory() as written:
        out, err = Path(written, "out"), Path(written, "err")
        process = Command(
            main,
            arguments,
            folder=folder,
            environment=environment,
            prepare=prepare,
            out=out,
            err=err,
        )
        code = process.wait(timeout_s)
        return Done(code=code, stdout=out.read_text("utf-8"), stderr=err.read_text("utf-8"))


def _command_main(
    main: Callable[[list[str]], int],
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    prepare: Callable[[], object] | None,
    out: Path,
    err: Path,
) -> NoReturn:
    for target, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    leave(main(arguments))


def _prepare_server() -> None:
    os.environ["VEOMNI_VERBOSITY"] = "ERROR"  # before the server imports it
    multiprocessing.set_forkserver_preload(["tests.distributed.preload"])
