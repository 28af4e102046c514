"""Replica processes for tests, which start in seconds: forked from one that has vllm-omni's imports
behind it, 14 s of a core, and has run nothing. What test_replica.py starts, and what a run starts
itself, is started as a user does it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SEARCH_PATH = os.pathsep.join(
    filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
)  # for rewards of the tests' own
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCH_PATH}
START_TIMEOUT_S = 240


class Zygote:
    """tests/e2e/zygote.py as a process, which lives as long as this one.

    For threads: an order at a time. overlay: a folder that comes before all that is installed.
    """

    def __init__(self, overlay: str = "") -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.zygote", str(theirs.fileno())],
            stdout=subprocess.DEVNULL,
            env=environment(overlay),
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()  # so that a dead zygote is an end of file here
        self._lines, self._lock = ours.makefile("rw"), threading.Lock()

    def order(self, **order: object) -> int | None:
        with self._lock:
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            answer = self._lines.readline()
        assert answer, (
            f"the process that forks replicas is gone, exit code {self._process.wait(10)}"
        )
        return json.loads(answer)


_zygote, _making = cache(Zygote), threading.Lock()


def zygote(overlay: str = "") -> Zygote:
    """The one of this process and overlay: also for two fixtures' threads that ask at once."""
    with _making:
        return _zygote(overlay)


def environment(overlay: str = "") -> dict[str, str]:
    """ENVIRONMENT, where a folder comes before all that is installed."""
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, (overlay, SEARCH_PATH)))}


class Forked:
    """A process of the zygote's, with what the tests use of subprocess.Popen.

    command: without the interpreter. overlay: see Zygote.
    """

    def __init__(self, command: Sequence[str], *, log: Path, overlay: str = "") -> None:
        self._zygote = zygote(overlay)
        self.pid = self._zygote.order(
            command=list(command), log=str(log), environment=environment(overlay)
        )
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.order(pid=self.pid)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end within {timeout_s} s")
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, signal_number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


def wait_for_announcements(
    registry: Path, servers: Mapping[Path, Forked | subprocess.Popen]
) -> None:
    """Until all of them, log → process, are in the registry; else they are killed, and
    AssertionError with a log's end.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while len(list(registry.glob("*.json"))) < len(servers):
            for log, server in servers.items():
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, (
                    f"not within {START_TIMEOUT_S} s: {log.read_text()[-3000:]}"
                )
            time.sleep(0.05)
    except BaseException:
        for server in servers.values():
            server.kill()
        raise


def start_replicas(
    count: int, *, folder: Path, command: Sequence[str], overlay: str = ""
) -> list[Forked]:
    """Starts `count` servers that announce themselves in folder/registry and waits until all have.

    command: `-m megadiff.cli.serve` or a script, and the arguments that they share. overlay: see
    Zygote.
    """
    parent = ["--parent-pid", str(os.getpid())]
    servers = {}
    for index in range(count):
        server = fork_replica(
            f"replica_{index}", folder=folder, command=[*command, *parent], overlay=overlay
        )
        servers[folder / f"replica_{index}.log"] = server
    wait_for_announcements(folder / "registry", servers)
    return list(servers.values())


def fork_replica(name: str, *, folder: Path, command: Sequence[str], overlay: str = "") -> Forked:
    """Starts a server that will announce itself in folder/registry; does not wait."""
    own = ["--name", name, "--port", "0", "--registry", str(folder / "registry")]
    return Forked([*command, *own], log=folder / f"{name}.log", overlay=overlay)


def replicas_of(run: Path) -> list[int]:
    """The processes that write to the logs of a run's own replicas. Their titles name the run, but
    not its folder.
    """
    pids = []
    for process in psutil.process_iter():
        try:
            files = [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if any(path.startswith(f"{run}/logs/replica_") for path in files):
            pids.append(process.pid)
    return pids


def stop(servers: Sequence[Forked]) -> None:
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait(30)
