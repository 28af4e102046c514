"""Run one server of the config's section `judge`: vLLM's, on loopback."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megadiff.config.rewards import JudgeConfig
from megadiff.process.bounded_http import BoundedHttp, NoAnswer
from megadiff.rewards.http_pool import GONE
from megadiff.rollout.client.processes import (
    TOKEN_VARIABLE,
    ServerProcess,
    log_tail,
    replica_environment,
)
from megadiff.train.check_judges import server_command

# Below those that Linux gives out by itself: a server binds its port seconds after it was chosen.
PORTS = range(20_000, 32_000)
HEALTH_TIMEOUT_S = 2.0
RESTART_S = 600.0  # for a server that was started again, before it can sleep
SLEEP_TIMEOUT_S = 120.0  # an 8 B model's weights cross PCIe in a second or two
DYING_S = 2.0  # the kernel takes a while to free a process's memory


class JudgeServer:
    """One server of `judge.<judge>`, started at once. It can be started again, on its port.

    index: among the judge's on this node. may_restart: whether a first death may be its last.
    """

    def __init__(
        self,
        judge: str,
        config: JudgeConfig,
        *,
        index: int,
        logs: Path,
        num_threads: int,
        may_restart: bool,
    ) -> None:
        self.judge = judge
        self.name = f"judge_{judge}_{index}"
        self.log = logs / f"{self.name}.log"
        self.may_restart = may_restart
        self.is_buried = False
        self._was_restarted = False
        self.is_asleep = False
        self._may_sleep = config.sleep
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        # Each look is a connection of its own: the server may be another by then.
        self._http = BoundedHttp(self.url, keep_alive_s=0.0)
        gpus = config.gpus[index * config.tp : (index + 1) * config.tp]
        self._start = partial(
            ServerProcess,
            self.name,
            server_command(judge, config, port=self._port, parent_pid=os.getpid()),
            environment=_environment(gpus, num_threads, sleeps=config.sleep),
            gpus=gpus,
        )
        self._obituary: ThreadingHTTPServer | None = None
        self.process = self._start(log=self.log)

    def is_healthy(self) -> bool:
        """Ask it. Raises RuntimeError, with the end of its log, where it has ended."""
        if death := self.process.death():
            raise RuntimeError(f"judge.{self.judge}: {death}")
        try:
            return self._status("GET", "/health", HEALTH_TIMEOUT_S) == 200
        except NoAnswer:
            return False

    def sleep(self) -> None:
        """Let it give its GPU memory back, where judge.<name>.sleep says so."""
        if not self._may_sleep or self.is_asleep:
            return
        # One that loads would take the memory in the middle of an update.
        deadline = time.monotonic() + RESTART_S
        while self._was_restarted and not self.process.death() and not self.is_healthy():
            if time.monotonic() > deadline:
                raise RuntimeError(self.late_text(RESTART_S))
            time.sleep(0.5)
        # First, and of a dead one as well: the trainer has the memory until wake(), and the watch
        # must not start it again.
        self.is_asleep = True
        self._tell("/sleep")

    def wake(self) -> None:
        """Wake it. One that died asleep is left to the watch, which has waited for this."""
        if self.is_asleep:
            self._tell("/wake_up")
            self.is_asleep = False

    def restart(self) -> None:
        """Start it anew where it died. It logs beside the log of its death."""
        self.may_restart = False
        self._was_restarted = True
        self.process.stop()  # what it left of its group still holds the port
        self.process = self._start(log=self.log.with_suffix(".restart.log"))

    def bury(self, death: str) -> None:
        """Answer each request on its port with its death, so that nobody waits for it."""
        self.process.stop()
        self.is_buried = True
        how, _, _ = death.partition("; the end of")
        reason = f"{how}; see {self.process.log}".encode()
        handler = type("_Reason", (_Obituary,), {"reason": reason})
        self._obituary = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        threading.Thread(target=self._obituary.serve_forever, name="obituary", daemon=True).start()

    def close(self) -> None:
        """Release the port and connections; the process is stopped by who has all of them."""
        self._http.close()
        if self._obituary:
            self._obituary.shutdown()
            self._obituary.server_close()

    def late_text(self, timeout_s: float) -> str:
        return (
            f"judge.{self.judge}: {self.name} is not healthy after {timeout_s:g} s; raise "
            f"rollout.start_timeout_s; the end of {self.log}:\n{log_tail(self.log)}"
        )

    def _tell(self, path: str) -> None:
        """POST to it, unless it is dead or loads again: the watch deals with that.

        Raises RuntimeError where it lives and does not obey.
        """
        try:
            status = self._status("POST", path, SLEEP_TIMEOUT_S)
        except NoAnswer as error:
            if self._is_gone():
                return
            raise RuntimeError(f"judge.{self.judge}: {error}") from error
        if status not in (200, GONE):
            raise RuntimeError(f"judge.{self.judge}: {self.name} answered {status} to {path}")

    def _is_gone(self) -> bool:
        """Tell whether it died, and may be loading again. A connection breaks before it is dead."""
        deadline = time.monotonic() + DYING_S
        while not (self.process.death() or self._was_restarted):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _status(self, method: str, path: str, timeout_s: float) -> int:
        answer = self._http.request(
            method, path, headers={}, timeout_s=timeout_s, max_bytes=1 << 16
        )
        return answer.status


class _Obituary(BaseHTTPRequestHandler):
    reason = b""

    def _tell(self) -> None:
        # A client that still sends would see a broken connection, and try again.
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(GONE)
        self.send_header("Content-Length", str(len(self.reason)))
        self.end_headers()
        self.wfile.write(self.reason)

    do_GET = _tell
    do_POST = _tell

    def log_message(self, *_: object) -> None:
        """Leave stderr to the run."""


def _environment(gpus: Sequence[int], num_threads: int, *, sleeps: bool) -> dict[str, str]:
    environment = replica_environment(num_threads=num_threads, gpus=gpus)
    environment.pop(TOKEN_VARIABLE, None)  # the replicas' alone
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if sleeps:
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # without it there is no /sleep
    if not gpus:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # vLLM would bind itself to the first cores, where the replicas may be already.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Unbound, its worker needs no process of its own: a third less to start.
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return environment


def _free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on loopback")
