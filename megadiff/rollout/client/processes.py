"""Replica processes that this run started: they never outlive it, and a dead one says why."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadiff.rollout.proof import check_token

logger = logging.getLogger(__name__)
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 1 << 16
CRASH = "Fatal Python error"  # the first line of faulthandler's
STOP_GRACE_S = 5.0
TOKEN_VARIABLE = "MEGADIFF_TOKEN"
TOKEN_FILE = "token"  # in the registry of a run that drew one; announcements end in .json
TORCHRUN_VARIABLES = re.compile(r"(TORCHELASTIC|LOCAL|GROUP|ROLE|MASTER)_.*|RANK|WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """How one replica is started. device: cpu or cuda; gpus: which of the node's, one for each of its tp workers, none on CPU.

    compile: torch.compile of its blocks. fp8, fp8_in_place: see megadiff.rollout.worker.fp8. float32_streams: of the config's model.
    weights: the folder of sync.transport=disk.
    """

    name: str
    model: Path
    dtype: str
    device: str
    gpus: tuple[int, ...]
    log: Path
    num_threads: int
    compile: bool = False
    fp8: bool = False
    fp8_in_place: bool = False
    float32_streams: bool = False
    tp: int = 1
    weights: Path | None = None


class ReplicaProcess:
    """A `megadiff serve` child in its own process group; it also dies when its parent does, however that dies.

    It takes a free port itself and announces its address in the registry folder when it is ready.
    token: None leaves it with this process's, if that has one.
    """

    def __init__(self, spec: ReplicaSpec, registry: Path, *, token: str | None = None) -> None:
        self.spec = spec
        self.token = token
        environment = replica_environment(spec, token=token)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("wb") as log:
            self.process = subprocess.Popen(
                serve_command(spec, registry),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def exit_text(self) -> str | None:
        """None while it runs; else its exit code and the end of its log."""
        code = self.process.poll()
        if code is None:
            return None
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        return f"{self.spec.name} (pid {self.process.pid}) {how}; the end of {self.spec.log}:\n{log_tail(self.spec.log)}"

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL after a grace period; returns when it is gone."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(self.process.pid, signal_number)
            try:
                self.process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            break
        _signal_group(
            self.process.pid, signal.SIGKILL
        )  # what the leader may have left in its group


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
    descriptor = os.open(registry / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(f"{token}\n")
    return token


def replica_environment(spec: ReplicaSpec, *, token: str | None = None) -> dict[str, str]:
    """This process's environment without torchrun's variables: the replica is a world of its own.

    With TORCHELASTIC_USE_AGENT_STORE left in it, its process group would wait for torchrun's store for ever.

    The token travels here and not as an argument: every user of the machine can read those.
    """
    kept = {
        name: value for name, value in os.environ.items() if not TORCHRUN_VARIABLES.fullmatch(name)
    }
    gpu = {"CUDA_VISIBLE_DEVICES": ",".join(map(visible_gpu, spec.gpus))} if spec.gpus else {}
    secret = {TOKEN_VARIABLE: token} if token else {}
    return {**kept, "OMP_NUM_THREADS": str(spec.num_threads), **gpu, **secret}


def serve_command(spec: ReplicaSpec, registry: Path) -> list[str]:
    """The command line of one replica."""
    return [
        *(sys.executable, "-m", "megadiff.cli.serve", str(spec.model)),
        *("--name", spec.name, "--port", "0", "--dtype", spec.dtype, "--device", spec.device),
        *("--registry", str(registry), "--parent-pid", str(os.getpid())),
        *(["--compile"] if spec.compile else []),
        *(["--fp8"] if spec.fp8 else []),
        *(["--fp8-in-place"] if spec.fp8_in_place else []),
        *(["--float32-streams"] if spec.float32_streams else []),
        *(["--tp", str(spec.tp)] if spec.tp > 1 else []),
        *(["--weights", str(spec.weights)] if spec.weights else []),
    ]


def visible_gpu(index: int) -> str:
    """The index-th GPU of those that this process sees, as CUDA_VISIBLE_DEVICES names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log file, or those around a crash below Python, which says so at length; '' when there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        found = file.read().decode("utf-8", errors="replace").splitlines()
    crash = next((place for place, line in enumerate(found) if line.startswith(CRASH)), None)
    shown = found[-lines:] if crash is None else found[max(0, crash - lines) : crash + lines]
    return "\n".join(f"  | {line}" for line in shown)


def stop_all(processes: Sequence[ReplicaProcess]) -> None:
    """Ask all to stop first, then wait for each."""
    for process in processes:
        if process.process.poll() is None:
            _signal_group(process.process.pid, signal.SIGTERM)
    for process in processes:
        process.stop()


def _signal_group(pid: int, signal_number: int) -> None:
    try:
        os.killpg(pid, signal_number)
    except ProcessLookupError:
        pass  # already gone
