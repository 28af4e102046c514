"""Run the servers of the config's section `judge`, on every node of the trainer.

A node's first rank starts and watches them. All of its ranks ask them, over loopback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megadiff.config.schema import Config
from megadiff.parallel.collectives import agreed, read_once
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.client.processes import stop_all
from megadiff.train.check_judges import used_judges
from megadiff.train.judge_server import JudgeServer
from megadiff.train.replicas import threads_each

logger = logging.getLogger(__name__)
POLL_S = 0.5


class Judges:
    """The judges that this rank asks.

    servers: those that it started, on a node's first rank. urls: `judge.<name>` → base URLs.
    """

    def __init__(
        self,
        servers: Sequence[JudgeServer],
        urls: Mapping[str, Sequence[str]],
        mesh: Mesh,
        config: Config,
    ) -> None:
        self.servers = servers
        self.urls = urls
        self._mesh = mesh
        self._sleeps = any(config.judge[name].sleep for name in urls)
        self._timeout_s = config.rollout.start_timeout_s
        self._started_s = time.monotonic()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="judges", daemon=True)

    def wait(self) -> None:
        """Wait until all are healthy, and watch them from then on. Collective.

        Raises AgreedError for a server that ends or is late, with the end of its log.
        """
        if self.urls:
            agreed(self._wait, self._mesh.cpu_group)

    def sleep(self) -> None:
        """Let those that may sleep do so. Collective, when all ranks have their scores."""
        self._for_all(JudgeServer.sleep)

    def wake(self) -> None:
        """Wake those that sleep. Collective."""
        self._for_all(JudgeServer.wake)

    def stop(self) -> None:
        """End the servers of this rank, and the watch."""
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        stop_all([server.process for server in self.servers])
        for server in self.servers:
            server.close()

    def _for_all(self, deed: Callable[[JudgeServer], None]) -> None:
        def act() -> None:
            for server in self.servers:
                deed(server)

        if self._sleeps:
            agreed(act, self._mesh.cpu_group)

    def _wait(self) -> None:
        for server in self.servers:
            while not server.is_healthy():
                if time.monotonic() - self._started_s > self._timeout_s:
                    raise TimeoutError(server.late_text(self._timeout_s))
                time.sleep(POLL_S)
        if self.servers:
            seconds = time.monotonic() - self._started_s
            logger.info("%d judges are ready after %.1f s", len(self.servers), seconds)
            self._watcher.start()

    def _watch(self) -> None:
        """Start a dead server again, or answer in its place that it is dead."""
        while not self._closed.wait(POLL_S):
            for server in self.servers:
                # Of one that sleeps the trainer has the memory: not before wake().
                is_watched = not (server.is_buried or server.is_asleep)
                death = server.process.death() if is_watched else ""
                if death:
                    self._answer_for(server, death)

    def _answer_for(self, server: JudgeServer, death: str) -> None:
        try:
            if server.may_restart:
                logger.error("judge.%s is started again: %s", server.judge, death)
                server.restart()
            else:
                logger.error("judge.%s is dead: %s", server.judge, death)
                server.bury(death)
        except OSError as error:  # a port that another process took meanwhile; watch the others
            logger.error("judge.%s cannot be answered for: %s", server.judge, error)


def launch_judges(config: Config, mesh: Mesh, folder: Path, stack: ExitStack) -> Judges:
    """Start the judges that rewards ask, and return at once. Collective.

    They end when `stack` closes. folder: of the run, which gets their logs.
    Raises AgreedError for GPUs that a node does not have.
    """
    servers: list[JudgeServer] = []
    urls: dict[str, list[str]] = {}

    def start() -> dict[str, list[str]]:
        servers.extend(_start(config, mesh, folder))
        for server in servers:
            urls.setdefault(server.judge, []).append(server.url)
        return urls

    if used_judges(config):
        urls = read_once(
            start, source=mesh.node_source, group=mesh.cpu_node_group, world=mesh.cpu_group
        )
    judges = Judges(servers, urls, mesh, config)
    stack.callback(judges.stop)
    return judges


def _start(config: Config, mesh: Mesh, folder: Path) -> Iterator[JudgeServer]:
    used = used_judges(config)
    for name in used:
        _check_device(name, config.judge[name].gpus, on_gpus=mesh.device.type == "cuda")

    num_servers = sum(config.judge[name].replicas for name in used)
    for name, rewards in used.items():
        # A restart helps only who can do without some scores meanwhile.
        users = [config.reward[reward] for reward in rewards]
        may_restart = any(user.on_failure == "drop" or not user.weight for user in users)
        for index in range(config.judge[name].replicas):
            yield JudgeServer(
                name,
                config.judge[name],
                index=index,
                logs=folder / "logs",
                num_threads=threads_each(mesh, num_servers),
                may_restart=may_restart,
            )


def _check_device(name: str, gpus: Sequence[int], *, on_gpus: bool) -> None:
    num_gpus = torch.cuda.device_count() if on_gpus else 0
    if gpus and max(gpus) >= num_gpus:
        raise ValueError(
            f"judge.{name}.gpus={list(gpus)}, and this node's ranks see {num_gpus} GPUs, counted "
            f"from 0; name some of those, or none where run.device=cpu"
        )
    if on_gpus and not gpus:
        raise ValueError(
            f"judge.{name}.gpus is empty, and vLLM for GPUs has no CPU; name GPUs of a node, from "
            f"0 to {num_gpus - 1}"
        )
