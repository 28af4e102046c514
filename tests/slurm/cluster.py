"""A real Slurm of a few nodes on this machine, which ends with the process that holds it.

Its first process reads a pipe of ours (cluster.sh): however this one ends, the cluster does too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("cluster.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def reason_to_skip() -> str:
    """Return why there can be no cluster here, '' where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return f"needs root for network namespaces, and runs as user {os.geteuid()}"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
    )
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """Nodes node1, node2, … and a login node. shared: folders below /tmp that all nodes see.

    num_gpu_nodes: the last ones, of partitions of their own.
    """

    def __init__(
        self, folder: Path, *, num_nodes: int, num_gpu_nodes: int, shared: Sequence[Path]
    ) -> None:
        self.folder = folder
        environment = {
            **os.environ,
            "SLURM_TEST_DIR": str(folder),
            "SLURM_TEST_SHARED": ":".join(map(str, shared)),
        }
        folder.mkdir(parents=True)
        log = (folder / "cluster.log").open("w")
        self._process = subprocess.Popen(
            [str(SCRIPT), "start", str(num_nodes), str(num_gpu_nodes)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self._answer("ready")

    def close(self) -> None:
        """Cut the pipe: the kernel ends every process of the cluster."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its child, the first process, dies with it
            self._process.wait()

    def power(self, node: str, *, on: bool) -> None:
        """Cut the power of a node, or switch it on again."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{'boot' if on else 'off'} {node}\n")
        self._process.stdin.flush()
        self._answer("done")
        if on:
            self._wait_until_idle(node)

    def start_slurmd(self, node: str) -> None:
        """Start the daemon of a node that lost it, as systemd would."""
        self.on(node, "bash", "-c", 'setsid slurmd -D -N "$0" </dev/null &>/dev/null &', node)
        self._wait_until_idle(node)

    def login(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Return what a command on the login node prints. Raises CalledProcessError."""
        return self._inside(self._first_child(self._process.pid), command, environment)

    def on(self, node: str, *command: str) -> str:
        """Return what a command on a node prints, beside Slurm. Raises CalledProcessError."""
        unshare = int((self.folder / "pids" / node).read_text())
        first = f"read -r child _ </proc/{unshare}/task/{unshare}/children"
        enter = 'exec nsenter --target "$child" --all --wd="$PWD" "$@"'
        return self.login("bash", "-c", f"{first}; {enter}", "on", *command)

    def jobs(self) -> set[str]:
        """Return the numbers of all jobs, those that ended too."""
        return set(self.login("squeue", "--noheader", "--states=all", "--format=%i").split())

    def used_nodes(self) -> set[str]:
        """Return the nodes of the jobs that run."""
        hosts = self.login("squeue", "--noheader", "--states=running", "--format=%N").split()
        if not hosts:
            return set()
        return set(self.login("scontrol", "show", "hostnames", ",".join(hosts)).split())

    def submit(self, *arguments: str, environment: Mapping[str, str]) -> Job:
        """Run sbatch, which hands our environment on, with these variables."""
        number = self.login("sbatch", "--parsable", *arguments, environment=environment)
        return Job(cluster=self, number=number.strip())

    def _wait_until_idle(self, node: str) -> None:
        wait_for(lambda: "idle" in self.login("sinfo", "-h", "-n", node, "-o", "%T"), what=node)

    def _first_child(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _inside(
        self, pid: int, command: Sequence[str], environment: Mapping[str, str] | None
    ) -> str:
        done = subprocess.run(
            ["nsenter", "--target", str(pid), "--all", f"--wd={os.getcwd()}", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(
                done.returncode, command, done.stdout, f"{done.stdout}{done.stderr}"
            )
        return done.stdout

    def _answer(self, expected: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != expected:
            log = (self.folder / "cluster.log").read_text()[-3000:]
            raise RuntimeError(f"the cluster says {line!r}, not {expected!r}; its log:\n{log}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of the cluster."""

    cluster: Cluster
    number: str

    def state(self) -> str:
        """Return PENDING, RUNNING, …"""
        jobs = ("squeue", "--noheader", "--states=all", f"--jobs={self.number}", "--format=%T")
        return self.cluster.login(*jobs).strip()

    def is_queued(self) -> bool:
        """Say whether it waits, runs, or is about to run again."""
        return self.state() not in ENDED

    def wait_until_ended(self, timeout_s: float) -> str:
        """Return its last state. Not by `sbatch --wait`, which looks every half minute."""
        wait_for(lambda: not self.is_queued(), what=f"the end of job {self.number}", s=timeout_s)
        return self.state()

    def steps(self) -> dict[str, str]:
        """Return the steps that run: name → JOB.STEP."""
        jobs = ("squeue", "--noheader", "--steps", f"--jobs={self.number}", "--format=%j %i")
        return dict(line.split() for line in self.cluster.login(*jobs).splitlines())

    def nodes(self) -> list[str]:
        """Return the nodes that it has now, none while it waits."""
        hosts = self.cluster.login("squeue", "--noheader", f"--jobs={self.number}", "--format=%N")
        if not hosts.strip():
            return []
        return self.cluster.login("scontrol", "show", "hostnames", hosts.strip()).split()

    def signal(self, *arguments: str) -> None:
        self.cluster.login("scancel", *arguments, self.number)


def wait_for(
    condition: Callable[[], object], *, what: str | Callable[[], str], s: float = 30.0
) -> None:
    """Poll until it is true. Raises TimeoutError that says what was waited for."""
    deadline = time.monotonic() + s
    while not condition():
        if time.monotonic() > deadline:
            missing = what if isinstance(what, str) else what()
            raise TimeoutError(f"no {missing} within {s:.0f} s")
        time.sleep(0.1)
