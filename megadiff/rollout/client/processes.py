"""Replica processes that this run started: they never outlive it, and a dead one says why."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megadiff.process.affinity import bind
from megadiff.rollout.proof import check_token
from megadiff.rollout.spec import ReplicaSpec

logger = logging.getLogger(__name__)
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 1 << 16
CRASH = "Fatal Python error"  # the first line of faulthandler's
AGAIN = "-- started again --"  # a line of the log; what stands before it is of an earlier process
# longer than EXIT_S of rollout.server.server, a replica's own last resort
STOP_GRACE_S = 5.0
TOKEN_VARIABLE = "MEGADIFF_TOKEN"
TOKEN_FILE = "token"  # in the registry of a run that drew one; announcements end in .json
# torchrun's, and those that the mesh sets for Megatron's collectives
TRAINER_VARIABLES = re.compile(
    r"(TORCHELASTIC|LOCAL|GROUP|ROLE|MASTER|CUDA_DEVICE_MAX)_.*|RANK|WORLD_SIZE"
)


class ReplicaDied(RuntimeError):
    """A replica is gone; the text names it and shows the end of its log."""


class ServerProcess:
    """A child in a process group of its own, which writes to a log.

    environment: all of it. gpus: which of this process's it uses; it runs beside them.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        gpus: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._environment = environment
        self._gpus = gpus
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)  # an earlier run's
        self.start()

    def start(self) -> None:
        """Start it, or start it again where it has ended; its log goes on."""
        with self.log.open("ab") as stream:
            if stream.tell():
                stream.write(f"{AGAIN}\n".encode())
                stream.flush()
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # a process group of its own, so that stop() reaches the workers too
                start_new_session=True,
            )
        self._is_group_gone = False
        if self._gpus:
            # at once, as threads that it starts inherit it
            bind(self.process.pid, self._gpus, name=self.name)

    def exit_code(self) -> int | None:
        """Return None while it runs. What an ended one has left in its group is killed, once."""
        code = self.process.poll()
        if code is not None and not self._is_group_gone:
            _signal_group(self.process.pid, signal.SIGKILL)
            # From now on the number may be another's: hours pass before a run ends.
            self._is_group_gone = True
        return code

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to its group, unless it has ended."""
        if self.exit_code() is None:
            _signal_group(self.process.pid, signal_number)

    def ending(self) -> str:
        """Return how it ended, with the exit code; '' while it runs."""
        code = self.exit_code()
        if code is None:
            return ""
        how = f"exited with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"{self.name} (pid {self.process.pid}) {how}"

    def stopped_pid(self) -> int:
        """Return which process of it is stopped, as by SIGSTOP; 0 where none is, or it has ended.

        Its workers are looked at as well: it waits for each of them.
        """
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            for process in (leader, *leader.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if process.status() == psutil.STATUS_STOPPED:
                        return process.pid
        return 0

    def death(self) -> str:
        """Return how it ended, and the end of its log; '' while it runs."""
        ending = self.ending()
        return f"{ending}; {log_end(self.log)}" if ending else ""

    def stop(self) -> None:
        """Send SIGTERM to the group, SIGKILL after a grace period; return when it is gone."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            self.send_signal(signal_number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_GRACE_S)
                break
        self.exit_code()  # what it has left is killed

    def kill(self) -> None:
        """End it for good at once, also a stopped one; return when its memory is free."""
        self.send_signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)


class ReplicaProcess(ServerProcess):
    """A `megadiff serve` child in its own process group; it also dies when its parent does.

    It takes a free port itself and announces its address in the spec's registry when it is ready.
    log: the spec is written beside it. num_threads: of its CPU work. gpus: which of this process's,
    one for each of its tp workers. token: None leaves it with this process's, if that has one.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        *,
        log: Path,
        num_threads: int,
        gpus: Sequence[int] = (),
        token: str | None = None,
    ) -> None:
        self.token = token
        log.parent.mkdir(parents=True, exist_ok=True)
        spec_file = log.with_suffix(".json")
        spec_file.unlink(missing_ok=True)  # an earlier start's
        write_private(spec_file, spec.to_json())
        super().__init__(
            spec.name,
            serve_command(spec_file),
            log=log,
            environment=replica_environment(num_threads=num_threads, gpus=gpus, token=token),
            gpus=gpus,
        )


def environment_token() -> str | None:
    """Return MEGADIFF_TOKEN, None where it is empty or not set.

    Raises ValueError for one that no header can hold.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    return check_token(token) if token else None


def write_token(registry: Path) -> str:
    """Draw a token for this registry's replicas, and write it where the user alone can read it.

    Raises FileExistsError where there is one.
    """
    token = secrets.token_hex(32)
    registry.mkdir(parents=True, exist_ok=True)
    write_private(registry / TOKEN_FILE, f"{token}\n")
    return token


def write_private(file: Path, text: str) -> None:
    """Write a new file that its user alone can read. Raises FileExistsError where there is one."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def replica_environment(
    *, num_threads: int, gpus: Sequence[int] = (), token: str | None = None
) -> dict[str, str]:
    """Return a replica's or judge's environment: this process's without what is for ranks alone."""
    # With torchrun's agent store among them, its process group would wait for that store for ever.
    environment = {
        name: value for name, value in os.environ.items() if not TRAINER_VARIABLES.fullmatch(name)
    }
    environment["OMP_NUM_THREADS"] = str(num_threads)

    if gpus:
        # The GPUs are counted among those that this process sees.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            names[index] if names else str(index) for index in gpus
        )

    if token:  # here and in no file or argument, which others may read
        environment[TOKEN_VARIABLE] = token
    return environment


def serve_command(spec_file: Path) -> list[str]:
    """Return the command line of one replica."""
    return [sys.executable, "-m", "megadiff.cli.serve", "--spec", str(spec_file)]


def log_end(log: Path) -> str:
    """Return the last lines of a log file, and which file that is."""
    return f"the end of {log}:\n{log_tail(log)}"


def log_tail(log: Path) -> str:
    """Return the last lines of a log file, or those around a crash below Python; '' without one.

    Those of its last process alone.
    """
    if not log.is_file():
        return ""

    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    lines = text.rpartition(f"{AGAIN}\n")[2].splitlines()

    shown = lines[-LOG_TAIL_LINES:]
    for index, line in enumerate(lines):
        # A crash is followed by all threads' stacks and the names of all extension modules.
        if line.startswith(CRASH):
            shown = lines[max(0, index - LOG_TAIL_LINES) : index + LOG_TAIL_LINES]
            break
    return "\n".join(f"  | {line}" for line in shown)


def stop_all(processes: Sequence[ServerProcess]) -> None:
    """Ask all to stop first, then wait for each."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.stop()


def _signal_group(pid: int, signal_number: int) -> None:
    with suppress(ProcessLookupError):  # already gone
        os.killpg(pid, signal_number)
