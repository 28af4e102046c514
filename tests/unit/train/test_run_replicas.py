"""Which replicas serve a push, and what becomes of a push and a draw when they are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megadiff.config.schema import Config
from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import AgreedError
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.report import Loss
from megadiff.train.connect import Connection
from megadiff.train.judges import Judges
from megadiff.train.run_replicas import RunReplicas
from tests.meshes import one_rank_mesh


class Client:
    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url


class FakeFleet:
    """Keep the clients; lose() as the real one."""

    def __init__(self, *clients: Client) -> None:
        self.replicas = list(clients)
        self.lost: dict[str, Loss] = {}
        self.calls: list[str] = []

    def set_replicas(self, clients: list[Client]) -> None:
        self.replicas = list(clients)
        self.lost = {}

    def lose(self, client: Client, loss: Loss) -> None:
        self.lost[client.url] = loss

    def sleep(self) -> None:
        self.calls.append("sleep")

    def trim(self) -> None:
        self.calls.append("trim")


class FakeSupervisor:
    """Say who serves: name → (address, life)."""

    def __init__(self, roster: Mapping[str, tuple[str, int]]) -> None:
        self.serving = dict(roster)
        self.lost: list[dict[str, Loss]] = []
        self.refused: list[str] = []
        self.well: list[dict[str, str]] = []
        self.on_ask: Callable[[], object] = lambda: None

    def roster(self, lost: dict[str, Loss], lives: dict[str, int]) -> dict[str, tuple[str, int]]:
        self.lost.append(lost)
        self.on_ask()
        if not self.serving:
            raise ReplicaDied("0 of rollout.min_replicas=1 replicas serve after 9 s")
        return self.serving

    def worked(self, replicas: dict[str, str]) -> None:
        self.well.append(replicas)

    def refuse(self, name: str, reason: str) -> None:
        self.refused.append(f"{name}: {reason}")
        del self.serving[name]


class Parts:
    """A RunReplicas with the fakes that it stands on; pushes: what each brought to whom."""

    def __init__(self) -> None:
        self.config = Config()
        self.config.rollout.sleep = "never"
        self.config.rollout.mode = "separate"
        mesh = one_rank_mesh()
        self.pushes: list[tuple[int, list[str]]] = []
        self.events: list[str] = []
        self.num_syncs = 0
        self.shared_base: object = None
        self.on_push: Callable[[], object] = lambda: None
        self.fleet = FakeFleet(Client("a", "http://a"), Client("b", "http://b"))
        self.supervisor = FakeSupervisor({"a": ("http://a", 1), "b": ("http://b", 1)})
        connection = Connection(fleet=self.fleet, supervisor=self.supervisor, make_client=Client)
        self.replicas = RunReplicas(
            connection,
            self.config,
            mesh,
            Judges([], {}, mesh, self.config),
            build_sync=self.build_sync,
            sampled_policy=self.sampled_policy,
            report=lambda kind, **fields: self.events.append(kind),
        )

    def build_sync(self, fleet: FakeFleet) -> SimpleNamespace:
        self.num_syncs += 1
        return SimpleNamespace(
            push=self.push,
            forget=lambda: self.fleet.calls.append("forget"),
            wake=lambda: self.fleet.calls.append("wake"),
            close=lambda: None,
            shared_base=self.shared_base,
        )

    @contextmanager
    def sampled_policy(self):
        self.fleet.calls.append("sampled policy")
        yield

    def push(self, version: int) -> dict[str, float]:
        self.pushes.append((version, [client.url for client in self.fleet.replicas]))
        self.on_push()
        if self.fleet.lost:
            raise AgreedError(f"lost: {self.fleet.lost}")
        return {"sync/gib": 1.0}

    def lose(self, name: str, *, until: tuple[str, int] | None) -> None:
        """Lose a replica, which serves again with this address and life, or never."""
        url, _ = self.supervisor.serving.pop(name)
        self.fleet.lose(Client(name, url), DEATH)
        if until:
            self.supervisor.serving[name] = until


BOTH = ["http://a", "http://b"]
DEATH = Loss("it died")


@pytest.mark.parametrize("sleep", ["always", "never"])
def test_a_step_brings_its_version_and_replicas_sleep_where_that_is_asked_for(sleep) -> None:
    parts = Parts()
    parts.replicas._sleeps = sleep == "always"
    timers = Timers()
    assert parts.replicas.bring(3, timers) == {"sync/gib": 1.0, "rollout/replicas": 2.0}
    assert parts.pushes == [(3, BOTH)] and parts.replicas.version == 3
    assert timers.pop().keys() == {"time/room_s", "time/sync_s"}
    assert parts.fleet.calls == ["sampled policy"]
    assert parts.supervisor.well == [{"a": "http://a", "b": "http://b"}]
    parts.replicas.rest()
    rest = ["sleep", "forget"] if sleep == "always" else []
    assert parts.fleet.calls == ["sampled policy", *rest]
    parts.replicas.wake(4)
    assert parts.pushes == [(3, BOTH), (4, BOTH)] and parts.num_syncs == 1


def test_replicas_that_sleep_keep_a_shared_base() -> None:
    parts = Parts()
    parts.replicas._sleeps = True
    parts.replicas.sync.shared_base = object()
    parts.replicas.rest()
    assert parts.fleet.calls == ["sleep", "wake"]


def test_members_change_before_a_push_only() -> None:
    parts = Parts()
    parts.replicas.wake(1)
    parts.supervisor.serving["c"] = ("http://c", 1)
    assert [client.name for client in parts.fleet.replicas] == ["a", "b"]
    parts.replicas.wake(2)
    assert parts.pushes[-1] == (2, [*BOTH, "http://c"]) and parts.num_syncs == 2
    del parts.supervisor.serving["a"]
    parts.replicas.wake(3)
    assert parts.pushes[-1] == (3, ["http://b", "http://c"]) and parts.num_syncs == 3


def test_another_life_at_the_same_address_gets_every_weight() -> None:
    """A sync that is kept would send what has changed since the last push alone."""
    parts = Parts()
    parts.replicas.wake(1)
    before = parts.fleet.replicas
    parts.supervisor.serving["a"] = ("http://a", 2)
    parts.replicas.wake(2)
    assert parts.num_syncs == 2
    assert [old is new for old, new in zip(before, parts.fleet.replicas)] == [False, True]


def test_a_push_that_loses_a_replica_begins_anew_with_those_that_serve() -> None:
    parts = Parts()
    moments = [lambda: parts.lose("b", until=("http://b2", 2)), lambda: parts.lose("a", until=None)]
    parts.on_push = lambda: moments.pop(0)() if moments else None
    parts.replicas.wake(5)
    assert parts.pushes == [(5, BOTH), (5, ["http://a", "http://b2"]), (5, ["http://b2"])]
    assert parts.events == ["push_retried"] * 2
    assert parts.supervisor.lost == [{}, {"http://b": DEATH}, {"http://a": DEATH}]


def test_a_push_that_fails_otherwise_ends_the_run() -> None:
    parts = Parts()

    def refuse() -> None:
        raise AgreedError("a answered 409: a flipped bit")

    parts.on_push = refuse
    with pytest.raises(AgreedError, match="a flipped bit"):
        parts.replicas.wake(5)
    assert parts.pushes == [(5, BOTH)] and not parts.events


def test_no_replica_left_ends_the_run_with_the_reasons() -> None:
    parts = Parts()
    parts.supervisor.serving.clear()
    with pytest.raises(AgreedError, match="0 of rollout.min_replicas=1 replicas serve after 9 s"):
        parts.replicas.wake(1)


class FakeDraw:
    """A draw that is done at the run of this number. lose: called by each run before."""

    def __init__(self, num_runs: int, lose: Callable[[], object]) -> None:
        self.left = num_runs
        self.lose = lose
        self.versions: list[int] = []

    def run(self) -> bool:
        self.left -= 1
        if self.left:
            self.lose()
        return self.left == 0

    def use_version(self, version: int) -> None:
        self.versions.append(version)


@pytest.mark.parametrize("newest", [None, 8])
def test_a_draw_without_replicas_waits_for_some_and_goes_on(newest) -> None:
    """With its own version; or with the engine's where that has moved on meanwhile."""
    parts = Parts()
    parts.replicas.wake(7)
    lives = iter([2, 3])

    def lose_all() -> None:
        parts.lose("a", until=("http://a", next(lives)))
        parts.lose("b", until=None) if "b" in parts.supervisor.serving else None

    draw = FakeDraw(3, lose_all)
    parts.replicas.finish(draw, here=True, version=newest)
    version = newest or 7
    assert parts.pushes == [(7, BOTH), (version, ["http://a"]), (version, ["http://a"])]
    assert draw.versions == ([8, 8] if newest else [])
    assert parts.num_syncs == 3


def test_an_evaluation_goes_on_with_the_weights_that_it_began_with() -> None:
    """The running average, and not those that steps draw with, under the same version."""
    parts = Parts()
    parts.replicas.wake(7)

    @contextmanager
    def averaged():
        parts.fleet.calls.append("average")
        yield
        parts.fleet.calls.append("policy")

    draw = FakeDraw(2, lambda: parts.lose("a", until=("http://a", 2)))
    parts.on_push = lambda: parts.fleet.calls.append("push")
    parts.replicas.finish(draw, here=True, weights=averaged)
    assert parts.fleet.calls == ["average", "push", "policy"]


def test_one_that_joins_passes_the_parity_gate_or_is_left_out() -> None:
    parts = Parts()
    parts.replicas.wake(1)
    admitted = []

    def gate(names: list[str]) -> None:
        admitted.append(list(names))
        if "odd" in names:
            raise AgreedError("parity/log_prob_gap_max 0.5 > 1e-5 in replica odd")

    parts.replicas.gate = gate
    parts.supervisor.serving["c"] = ("http://c", 1)
    parts.replicas.wake(2)
    parts.supervisor.serving["odd"] = ("http://odd", 1)
    parts.replicas.wake(3)
    assert admitted == [["c"], ["odd"]]
    assert parts.supervisor.refused == ["odd: parity/log_prob_gap_max 0.5 > 1e-5 in replica odd"]
    assert parts.pushes[-2:] == [(3, [*BOTH, "http://c", "http://odd"]), (3, [*BOTH, "http://c"])]


def test_a_newcomer_that_cannot_take_the_weights_ends_no_run() -> None:
    """Such as one of another model. One that was there before would end it."""
    parts = Parts()
    parts.replicas.wake(1)
    parts.replicas.gate = lambda names: None
    parts.supervisor.serving["odd"] = ("http://odd", 1)

    def refuse() -> None:
        if len(parts.fleet.replicas) == 3:
            raise AgreedError("odd holds other tensors than were sent")

    parts.on_push = refuse
    parts.replicas.wake(2)
    assert parts.pushes[-1] == (2, BOTH)
    assert parts.supervisor.refused == ["odd: odd holds other tensors than were sent"]


def test_of_newcomers_that_come_together_the_bad_one_alone_is_refused() -> None:
    """Whether a push or the gate finds it, and wherever its name stands in the order."""
    for bad, finder in (("c", "gate"), ("d", "push"), ("e", "gate")):
        parts = Parts()
        parts.replicas.wake(1)

        def check(names: list[str], bad=bad) -> None:
            if bad in names:
                raise AgreedError("some replica computes otherwise")

        parts.replicas.gate = check if finder == "gate" else lambda names: None
        if finder == "push":
            parts.on_push = lambda parts=parts, check=check: check(
                [client.name for client in parts.fleet.replicas]
            )
        for name in "cde":
            parts.supervisor.serving[name] = (f"http://{name}", 1)
        assert parts.replicas.bring(2, Timers())["rollout/replicas"] == 4.0
        assert parts.supervisor.refused == [f"{bad}: some replica computes otherwise"]
        well = [*BOTH, *(f"http://{name}" for name in "cde" if name != bad)]
        assert parts.pushes[-1] == (2, well)
        parts.replicas.wake(3)
        assert parts.pushes[-1] == (3, well)


def test_a_newcomer_passes_the_gate_also_where_its_first_push_lost_another() -> None:
    parts = Parts()
    parts.replicas.wake(1)
    admitted = []
    parts.replicas.gate = lambda names: admitted.append(list(names))
    parts.supervisor.serving["c"] = ("http://c", 1)
    losses = [lambda: parts.lose("b", until=None)]
    parts.on_push = lambda: losses.pop()() if losses else None
    parts.replicas.wake(2)
    assert parts.pushes[-1] == (2, ["http://a", "http://c"]) and admitted == [["c"]]


def test_a_check_is_made_again_where_it_failed_by_a_lost_replica() -> None:
    parts = Parts()
    parts.replicas.wake(0)
    failures = [lambda: parts.lose("b", until=None)]

    def check() -> dict[str, float]:
        if failures:
            failures.pop()()
            raise AgreedError("b does not answer")
        return {"gap": 0.0}

    assert parts.replicas.retry(check) == {"gap": 0.0}
    assert parts.pushes == [(0, BOTH), (0, ["http://a"])]

    with pytest.raises(AgreedError, match="a gap"):
        parts.replicas.retry(lambda: (_ for _ in ()).throw(AgreedError("a gap")))


def test_replicas_get_the_memory_of_optimizer_state_before_a_push() -> None:
    parts = Parts()
    parts.replicas._offload = lambda: parts.events.append("offload")
    parts.on_push = lambda: parts.events.append("push")
    parts.replicas.wake(1)
    parts.replicas.bring(2, Timers())
    assert parts.events == ["offload", "push"] * 2
