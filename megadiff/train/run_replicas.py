"""Let a run's replicas draw, rest, fail and come back, in step with the trainer.

Which replicas belong to the run changes in one place, before a push. So a replica always gets the
policy before it serves, and all ranks work with the same ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megadiff.config.schema import Config
from megadiff.config.validate import sleeps
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import (
    AgreedError,
    agreed,
    all_reduce_sums,
    any_rank,
    gather_json,
    read_once,
)
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.report import Loss, Report, no_report
from megadiff.sync.sync import WeightSync
from megadiff.train.connect import Connection
from megadiff.train.judges import Judges
from megadiff.train.replicas import users_of
from megadiff.train.sampling import Redrawable
from megadiff.types import Figures

logger = logging.getLogger(__name__)
# names of replicas → raises AgreedError on all ranks where one computes otherwise
Gate = Callable[[Sequence[str]], object]


class RunReplicas:
    """Decide who has the GPUs: replicas and judges, or the trainer. All methods are collective."""

    def __init__(
        self,
        connection: Connection,
        config: Config,
        mesh: Mesh,
        judges: Judges,
        *,
        build_sync: Callable[[Fleet], WeightSync],
        sampled_policy: Callable[[], AbstractContextManager[None]] = nullcontext,
        offload: Callable[[], None] = lambda: None,
        report: Report = no_report,
    ) -> None:
        """Take over a fleet.

        build_sync: collective. sampled_policy: an engine has the weights that steps draw with.
        offload: frees what the trainer needs for updates alone; collective.
        report: told of pushes that begin anew.
        """
        self._report = report
        self.fleet = connection.fleet
        self.sync = build_sync(self.fleet)
        self.gate: Gate | None = None  # set when the first replicas have passed it
        self._supervisor = connection.supervisor
        self._make_client = connection.make_client
        self._build_sync = build_sync
        self._sampled_policy = sampled_policy
        self._offload = offload
        self._mesh = mesh
        self._judges = judges
        self._users = users_of(config, mesh)
        self._sleeps = sleeps(config, device_type=mesh.device.type)
        self._share_gpus = config.rollout.mode == "colocated" and mesh.device.type == "cuda"
        self.version = 0  # of the last push
        self._roster_lives: dict[str, int] = {}  # replica → the life it leads
        self._served_lives: dict[str, int] = {}  # the same, of those that took the last whole push

    def close(self) -> None:
        self.sync.close()

    def bring(self, version: int, timers: Timers) -> Figures:
        """Let the replicas draw a step's samples from a version of the weights; timed.

        Returns the sync's figures, and how many replicas took the weights. Raises AgreedError when
        replicas refuse or differ, or too few are left.
        """
        lost = self._gather_lost()
        if self._supervisor:  # those that are still well have drawn the samples before
            fleet = self.fleet.replicas
            self._supervisor.worked(
                {client.name: client.url for client in fleet if client.url not in lost}
            )
        with timers("room"):
            self._make_room()
        with timers("sync"), self._sampled_policy():
            return self._push(version)

    def wake(self, version: int) -> None:
        """Bring all replicas to a version of the weights; they stay awake."""
        self._make_room()
        self._push(version)

    def finish(
        self,
        draw: Redrawable,
        *,
        here: bool,
        version: int | None = None,
        weights: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Run a draw on the ranks where `here` is true until it is done on all of them.

        Where replicas were lost and it is not, others are brought to the version of the weights
        that the engine has, and it is run again. version: of those weights, where they are not
        those of the last push any more; what is missing is then drawn with them. weights: a context
        in which the engine has those that the draw is of, by default the ones that steps draw with.
        """
        while True:
            is_done = agreed(draw.run, self._mesh.cpu_group, here=here)
            is_lacking = any_rank(is_done is False, self._mesh.cpu_group)
            if not is_lacking:
                return
            if version is not None:
                self.version = version
                draw.use_version(version)
            with (weights or self._sampled_policy)():
                self._push(self.version)

    def retry(self, action: Callable[[], Figures]) -> Figures:
        """Return a collective action's figures; run it again where it failed by a lost replica."""
        while True:
            try:
                return action()
            except AgreedError:
                if not self._has_lost():
                    raise
            self._push(self.version)

    def rest(self) -> None:
        """Let the replicas free their weights' memory where rollout.sleep says so.

        The next push wakes them, and brings every weight but those of a shared base. Where they do
        not sleep, they give back what sampling needed.
        """
        if self._sleeps:
            agreed(self.fleet.sleep, self._mesh.cpu_group, here=self._users.here)
            if self.sync.shared_base:
                self.sync.wake()
            else:
                self.sync.forget()
        else:
            self.trim()
        self._judges.sleep()

    def trim(self) -> None:
        """Give the trainer what the replicas' allocators keep of the last samples, on its GPUs."""
        if self._share_gpus:
            agreed(self.fleet.trim, self._mesh.cpu_group, here=self._users.here)

    def _make_room(self) -> None:
        """Give the replicas what updates need, and what this rank's allocator keeps of them."""
        self._offload()
        self._empty_cache()
        self._judges.wake()

    def _empty_cache(self) -> None:
        """Give the replicas what this rank's allocator keeps, on GPUs that they share."""
        if self._share_gpus:
            agreed(torch.cuda.empty_cache, self._mesh.cpu_group)

    def _push(self, version: int) -> Figures:
        """Settle who serves from now on, and bring those replicas to a version of the weights.

        Begins anew when one is lost meanwhile, or cannot take the weights and has just joined.
        Where several have joined and it fails, they come one by one, so that the bad one is known.
        """
        self.version = version
        start_s = time.monotonic()
        one_by_one = False
        while True:
            joined = self._change_members(one_by_one=one_by_one)
            # Colocated ones were started by this run, with the command of those before.
            on_trial = joined if joined and self._users.node is None else []
            try:
                if joined is not None:
                    self.sync.close()
                    self.sync = self._build_sync(self.fleet)
                figures = self.sync.push(version)
                self._empty_cache()  # of gathered weights
                if on_trial and self.gate:
                    self.gate(on_trial)
            except AgreedError as error:
                if not self._has_lost():
                    if not on_trial or not self.gate:
                        raise
                    if len(on_trial) == 1:
                        self._refuse(on_trial[0], str(error))
                    one_by_one = True
                self._begin_anew(error, time.monotonic() - start_s)
                continue
            self._served_lives = self._roster_lives
            if not (one_by_one and joined):
                return figures | self._num_serving()

    def _begin_anew(self, error: AgreedError, lost_s: float) -> None:
        """Let the next push bring everything, and tell of it."""
        logger.warning("the push of version %d begins anew: %s", self.version, error)
        if self._users.here:
            self._report("push_retried", lost_s=lost_s, text=str(error))
        self.sync.forget()

    def _num_serving(self) -> Figures:
        """Count the replicas of all nodes that hold the weights. Collective."""
        count = float(len(self.fleet.replicas)) if self._users.here else 0.0
        return all_reduce_sums({"rollout/replicas": count}, self._mesh.cpu_group)

    def _change_members(self, *, one_by_one: bool) -> list[str] | None:
        """Work with the replicas that serve now.

        one_by_one: of new ones take the first alone.
        Returns the names of those that are new, None where nothing has changed on any node.
        """
        before = {client.url: client for client in self.fleet.replicas}
        users = self._users
        lost = self._gather_lost()
        roster: Mapping[str, tuple[str, int]] = read_once(
            lambda: self._supervisor.roster(lost, self._roster_lives) if self._supervisor else None,
            source=users.source,
            group=users.group,
            world=self._mesh.cpu_group,
        )
        going_on = {}  # name → client
        for name, (url, life) in roster.items():
            # Another life at the same address may be a process that holds other weights. Before
            # the first push those that were announced are there, and hold none.
            has_served = not self._served_lives or self._served_lives.get(name) == life
            if url in before and url not in lost and has_served:
                going_on[name] = before[url]
        if one_by_one:
            new_names = [name for name in roster if name not in going_on]
            roster = {name: roster[name] for name in roster if name not in new_names[1:]}
        self._roster_lives = {name: life for name, (_, life) in roster.items()}

        is_changed = bool(lost) or not len(going_on) == len(roster) == len(before)
        if not any_rank(is_changed, self._mesh.cpu_group):
            return None

        joined = [name for name in roster if name not in going_on]
        new = {name: self._make_client(name, roster[name][0]) for name in joined}
        clients = going_on | new
        self.fleet.set_replicas([clients[name] for name in roster])
        return joined

    def _gather_lost(self) -> dict[str, Loss]:
        """Return what any rank that shares these replicas has lost, by address. Collective."""
        lost: dict[str, Loss] = {}
        for losses in gather_json(self.fleet.lost, self._users.group):
            lost |= {url: Loss(*loss) for url, loss in losses.items()}
        return lost

    def _refuse(self, name: str, reason: str) -> None:
        """Leave out one that others started and that cannot serve: no newcomer ends a run."""
        if self._supervisor:
            self._supervisor.refuse(name, reason)
        for client in self.fleet.replicas:
            if client.name == name:
                self.fleet.lose(client, Loss(f"it cannot serve this run: {reason}"))

    def _has_lost(self) -> bool:
        return any_rank(bool(self.fleet.lost), self._mesh.cpu_group)
