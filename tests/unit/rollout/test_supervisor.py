"""The watch over replicas: who ends, restarts, joins and leaves, and what the user is told."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megadiff.rollout.client import members as members_module
from megadiff.rollout.client import supervisor as supervisor_module
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.members import Members
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.registry import Claim, RegistryWatch
from megadiff.rollout.client.report import HUNG, Loss
from megadiff.rollout.client.supervisor import Supervisor
from megadiff.rollout.limits import RUN_HEADER
from megadiff.rollout.server.announcement import announced
from tests.unit.process.strangers import Stranger, reply
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TICK_S", 0.05)
    monkeypatch.setattr(members_module, "FIRST_BACKOFF_S", 0.05)


class Peer:
    """A replica's /health, announced, with a process that is none.

    is_silent: it answers nothing, as when it is stopped. is_stopped: what its process is said to
    be. num_questions: that it got. deeds: what was done with its process.
    """

    def __init__(self, registry: Path, name: str) -> None:
        self.name = name
        self.log = registry / f"{name}.log"
        self.is_silent = False
        self.is_taken_by = ""
        self.is_stopped = False
        self.num_questions = 0
        self.deeds: list[str] = []
        self.on_start: Callable[[], object] = lambda: None
        self._death = ""
        self._registry = registry
        self._stack = ExitStack()
        self._announcement = ExitStack()
        self.url = ""

    def serve(self) -> None:
        """Open an address, and announce it."""
        self._stack.close()
        self.url = self._stack.enter_context(Stranger(self._answer)).url
        self.announce()

    def announce(self) -> None:
        self._announcement.enter_context(announced(self._registry, name=self.name, url=self.url))

    def withdraw(self) -> None:
        self._announcement.close()

    def close(self) -> None:
        self.withdraw()
        self._stack.close()

    def die(self) -> None:
        """End as by SIGKILL: the announcement stays."""
        self._stack.close()
        self._death = f"{self.name} (pid 7) was killed by SIGKILL"

    def ending(self) -> str:
        return self._death

    def stopped_pid(self) -> int:
        return 7 if self.is_stopped else 0

    def kill(self) -> None:
        self.deeds.append("kill")
        self.is_stopped = False

    def start(self) -> None:
        self.deeds.append("start")
        self._death = ""
        self.is_silent = False
        self.on_start()

    def _answer(self, handler: Any, _: bytes) -> None:
        self.num_questions += 1
        if self.is_silent:
            time.sleep(2.5)
        run = handler.headers.get(RUN_HEADER)
        is_taken = self.is_taken_by not in ("", run)
        reply(handler, json.dumps({"name": self.name, "is_taken": is_taken}).encode())


@contextmanager
def peers(registry: Path, *names: str) -> Iterator[list[Peer]]:
    made = [Peer(registry, name) for name in names]
    for peer in made:
        peer.serve()
    try:
        yield made
    finally:
        for peer in made:
            peer.close()


@contextmanager
def supervised(
    registry: Path,
    *present: Peer | ReplicaClient,
    ours: bool = False,
    token: str | None = None,
    run: str = "mine",
    **options: Any,
) -> Iterator[tuple[Supervisor, list[str]]]:
    """Watch these; yields the kinds of events as well, each with its replica."""
    events: list[str] = []

    def report(
        kind: str, *, replica: str = "", lost_s: float | None = None, text: str = ""
    ) -> None:
        events.append(f"{kind} {replica}".strip())

    processes = {peer.name: peer for peer in present} if ours else {}
    members = Members(list(processes), max_restarts=options.pop("max_restarts", 3))
    for peer in present:
        members.join(peer.name, peer.url, time.monotonic())
    settings = {"heartbeat_s": 60.0, "start_timeout_s": 30.0, "min_replicas": 1} | options
    with Supervisor(
        registry=RegistryWatch(registry, token=token, run=run),
        members=members,
        make_client=lambda name, url: ReplicaClient(url, name, token=token, run=run),
        processes=processes,
        report=report,
        **settings,
    ) as supervisor:
        yield supervisor, events


def test_a_dead_replica_is_started_again_so_often_and_no_more(tmp_path, caplog) -> None:
    """Its place is taken when its process group is gone. Then the run ends with every reason."""
    with peers(tmp_path, "r") as (peer,):
        peer.on_start = peer.serve
        with supervised(tmp_path, peer, ours=True, max_restarts=2) as (supervisor, events):
            for count in (1, 2):
                before = peer.url
                peer.die()
                wait_for(lambda: peer.deeds == ["kill", "start"] * count)  # noqa: B023
                roster = supervisor.roster({})
                assert roster == {"r": (peer.url, count + 1)} and peer.url != before
                text = f"r is started again ({count} of rollout.max_restarts=2 in a row)"
                assert text in caplog.text

            peer.die()
            began = time.monotonic()
            with pytest.raises(ReplicaDied) as died:
                supervisor.roster({})
            assert time.monotonic() - began < 10
        assert peer.deeds == ["kill", "start"] * 2 + ["kill"]
    assert "0 of rollout.min_replicas=1 replicas serve after" in str(died.value)
    assert "r (out: r (pid 7) was killed by SIGKILL)" in str(died.value)
    again = ["replica_died r", "replica_restarted r", "replica_joined r"]
    assert [event for event in events if event.endswith(" r")] == [*again, *again, "replica_died r"]


def test_a_step_that_was_drawn_clears_deaths_of_those_that_are_well(tmp_path) -> None:
    """Not of one that died in it: a replica that dies in every step is not started for ever."""
    with peers(tmp_path, "r") as (peer,):
        peer.on_start = peer.serve
        with supervised(tmp_path, peer, ours=True, max_restarts=1) as (supervisor, _):
            in_step = {"r": peer.url}
            peer.die()
            wait_for(lambda: supervisor.roster({})["r"][0] == peer.url != in_step["r"])
            supervisor.worked(in_step)
            assert supervisor.members.members["r"].num_deaths == 1
            supervisor.worked({"r": peer.url})
            assert supervisor.members.members["r"].num_deaths == 0


def test_a_stopped_replica_is_ended_for_good_before_its_place_is_taken(tmp_path, caplog) -> None:
    """One that woke up later would serve an old policy."""
    with peers(tmp_path, "r") as (peer,):
        with supervised(tmp_path, peer, ours=True, heartbeat_s=0.5) as (supervisor, events):
            peer.is_silent = True
            wait_for(lambda: "start" in peer.deeds)
            assert peer.deeds == ["kill", "start"]
            assert events[0] == "replica_hung r"
            # its old announcement is still there, and counts no less than a new one
            assert supervisor.roster({})["r"] == (peer.url, 2)
    assert "r is lost: it has not answered for" in caplog.text
    assert "rollout.heartbeat_s=0.5" in caplog.text


def test_one_that_is_stopped_while_it_starts_is_ended_after_its_heartbeat(tmp_path) -> None:
    """And not after rollout.start_timeout_s, which is minutes for a large model."""
    with peers(tmp_path, "r") as (peer,):
        peer.on_start = lambda: setattr(peer, "is_stopped", len(peer.deeds) == 2)
        with supervised(tmp_path, peer, ours=True, heartbeat_s=0.5) as (supervisor, events):
            peer.die()
            wait_for(lambda: peer.deeds == ["kill", "start"] * 2)
            assert "has been stopped for" in supervisor.members.members["r"].reason
            peer.serve()
            assert supervisor.roster({})["r"] == (peer.url, 2)
    starts = [kind for kind in events if kind != "waited_for_replicas"]
    hung = ["replica_hung r", "replica_restarted r", "replica_joined r"]
    assert starts == ["replica_died r", "replica_restarted r", *hung]


def test_one_watch_ends_a_hang_for_the_run_and_for_the_calls_that_wait(tmp_path) -> None:
    """It is asked once an interval, whoever calls it; who hangs first is told as hung."""
    with peers(tmp_path, "r") as (peer,):
        client = ReplicaClient(peer.url, "r", run="mine", timeout_s=60.0)
        with Fleet([client], batch_size=1, heartbeat_s=None) as fleet:
            options = {"ours": True, "fleet": fleet, "heartbeat_s": 0.8}
            with supervised(tmp_path, peer, **options) as (supervisor, events):
                peer.is_silent = True
                began_s = time.monotonic()
                with pytest.raises(ReplicaDied, match="r at http.* does not answer"):
                    fleet.call(client, ReplicaClient.trim)
                assert time.monotonic() - began_s < 10
                assert fleet.lost[peer.url].kind == "replica_hung"
                assert "rollout.heartbeat_s=0.8" in fleet.lost[peer.url].reason
                wait_for(lambda: "start" in peer.deeds)
                assert list(supervisor.roster(fleet.lost)) == ["r"]
        assert events[:3] == ["replica_hung r", "replica_restarted r", "replica_joined r"]


def test_a_called_replica_gets_no_second_pulse(tmp_path) -> None:
    with peers(tmp_path, "r") as (peer,):
        client = ReplicaClient(peer.url, "r", run="mine")
        with Fleet([client], batch_size=1, heartbeat_s=None) as fleet:
            with supervised(tmp_path, peer, fleet=fleet, heartbeat_s=4.0):  # asked once a second
                wait_for(lambda: peer.num_questions)
                fleet.call(client, lambda client: time.sleep(1.5))
                assert peer.num_questions <= 3


def test_one_that_left_the_roster_is_watched_in_its_last_call(tmp_path) -> None:
    """After SIGTERM it finishes what it has, and may hang in it."""
    with peers(tmp_path, "r", "other") as (peer, other):
        client = ReplicaClient(peer.url, "r", run="mine", timeout_s=60.0)
        with Fleet([client], batch_size=1, heartbeat_s=None) as fleet:
            options = {"fleet": fleet, "heartbeat_s": 0.8}
            with supervised(tmp_path, peer, other, **options) as (supervisor, _):
                peer.withdraw()
                wait_for(lambda: list(supervisor.members.roster) == ["other"])
                peer.is_silent = True
                with pytest.raises(ReplicaDied):
                    fleet.call(client, ReplicaClient.trim)
                assert fleet.lost[peer.url].kind == "replica_hung"


def test_what_another_rank_found_keeps_its_kind(tmp_path) -> None:
    with peers(tmp_path, "a", "b", "c") as (first, second, third):
        with supervised(tmp_path, first, second, third) as (supervisor, events):
            lost = {first.url: Loss("it has not answered", HUNG), second.url: Loss("it broke")}
            supervisor.roster(lost)
    assert events[:2] == ["replica_hung a", "replica_died b"]


def test_others_join_and_leave_while_the_run_goes_on(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    with peers(tmp_path, "a", "b") as (first, second):
        second.withdraw()
        with supervised(tmp_path, first) as (supervisor, events):
            assert list(supervisor.roster({})) == ["a"]
            second.announce()
            wait_for(lambda: list(supervisor.roster({})) == ["a", "b"])
            assert f"b joins at {second.url}" in caplog.text
            first.withdraw()  # as after SIGTERM
            wait_for(lambda: list(supervisor.roster({})) == ["b"])
            assert "a has left the run" in caplog.text
    assert events == ["replica_joined b", "replica_left a"]


def test_a_step_waits_for_min_replicas_and_says_so(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "PROGRESS_S", 0.2)
    with peers(tmp_path, "a", "b") as (first, second):
        second.withdraw()
        with supervised(tmp_path, first, min_replicas=2) as (supervisor, events):
            threading.Timer(1.2, second.announce).start()
            assert list(supervisor.roster({})) == ["a", "b"]
    assert "1 of rollout.min_replicas=2 replicas serve after 0 s, rollout.start_timeout_s=30" in (
        caplog.text
    )
    assert "waited_for_replicas" in events

    with peers(tmp_path, "a") as (first,):
        limits = {"min_replicas": 2, "start_timeout_s": 0.5}
        with supervised(tmp_path, first, **limits) as (supervisor, _):
            text = r"1 of rollout\.min_replicas=2 replicas serve after .* s, .*start_timeout_s=0\.5"
            with pytest.raises(ReplicaDied, match=text):
                supervisor.roster({})


def test_who_does_not_fit_or_works_for_another_run_is_left_alone(tmp_path, caplog) -> None:
    def check(entry: Mapping[str, Any]) -> None:
        if entry["name"] == "odd":
            raise ValueError("odd has fp8=True, the run rollout.fp8=False")

    with peers(tmp_path, "a", "odd", "taken") as (first, _, taken):
        taken.is_taken_by = "theirs"
        with supervised(tmp_path, first, check=check) as (supervisor, events):
            wait_for(lambda: events)
            time.sleep(0.3)
            assert list(supervisor.roster({})) == ["a"]
            taken.is_taken_by = ""
            wait_for(lambda: list(supervisor.roster({})) == ["a", "taken"])
    assert events == ["replica_refused odd", "replica_joined taken"]
    assert "odd is left out: odd has fp8=True, the run rollout.fp8=False" in caplog.text


def test_a_newcomer_that_does_not_fit_takes_nothing_from_the_replica_of_its_name(
    tmp_path, caplog
) -> None:
    """As where two containers have one hostname: its announcement replaces the first one's."""

    def check(entry: Mapping[str, Any]) -> None:
        if entry["url"] != first.url:
            raise ValueError("a runs megadiff 7, and the run began with megadiff 1")

    with peers(tmp_path, "a") as (first,), peers(tmp_path, "a") as (other,):
        with supervised(tmp_path, first, check=check) as (supervisor, events):
            wait_for(lambda: events)
            num_questions = other.num_questions
            time.sleep(1.5)
            assert {name: url for name, (url, _) in supervisor.roster({}).items()} == {
                "a": first.url
            }
            other.withdraw()  # its announcement, which had replaced the first one's
            time.sleep(1.5)
            assert list(supervisor.roster({})) == ["a"]
    assert events == ["replica_refused a"] and num_questions


def test_one_of_ours_that_starts_again_with_other_code_is_ended(tmp_path) -> None:
    def check(entry: Mapping[str, Any]) -> None:
        raise ValueError("a runs megadiff 7, and the run began with megadiff 1")

    with (
        peers(tmp_path, "a") as (peer,),
        supervised(tmp_path, peer, ours=True, check=check) as (supervisor, events),
    ):
        peer.on_start = peer.serve
        peer.die()
        with pytest.raises(ReplicaDied, match=r"a \(out: a runs megadiff 7, and the run began"):
            supervisor.roster({})
        assert events[-1] == "replica_refused a"
        assert peer.deeds == ["kill", "start", "kill"]


def test_another_process_at_the_same_address_leads_another_life(tmp_path, caplog) -> None:
    """A service that starts a replica again on its port: it holds no weights of the run's."""
    with peers(tmp_path, "a") as (peer,):
        with supervised(tmp_path, peer) as (supervisor, events):
            wait_for(lambda: supervisor._processes_seen)
            assert supervisor.roster({}) == {"a": (peer.url, 1)}
            peer.announce()
            wait_for(lambda: "replica_joined a" in events)
            assert supervisor.roster({}) == {"a": (peer.url, 2)}
    assert events[0] == "replica_died a"
    assert "another process has begun in its place" in caplog.text


def test_what_a_rank_found_to_be_of_no_use_comes_back_with_another_life(tmp_path) -> None:
    with peers(tmp_path, "a", "b") as (first, second):
        with supervised(tmp_path, first, second) as (supervisor, _):
            assert list(supervisor.roster({first.url: Loss("it fails its calls")})) == ["b"]
            wait_for(lambda: supervisor.roster({}).get("a") == (first.url, 2))
            assert supervisor.roster({})["b"] == (second.url, 1)

            # What the ranks say of its first life is no news of its second.
            of_before = {first.url: Loss("it fails its calls")}
            assert "a" in supervisor.roster(of_before, {"a": 1, "b": 1})
            assert "a" not in supervisor.roster(of_before, {"a": 2, "b": 1})


def test_who_has_left_meanwhile_cannot_be_refused(tmp_path) -> None:
    with peers(tmp_path, "a") as (peer,):
        with supervised(tmp_path, peer) as (supervisor, events):
            supervisor.refuse("gone", "its weights are others")
            assert list(supervisor.roster({})) == ["a"] and not events


@pytest.mark.parametrize(("count", "least", "most"), [(4, 8, 40), (480, 1, 1)])
def test_a_large_registry_is_read_less_often(count, least, most):
    """Each look reads all announcements, for as long as the run goes on."""
    entry = {"name": "a", "url": "http://127.0.0.1:1"}
    looks = []
    registry: Any = SimpleNamespace(
        claims=[Claim(path=Path("a.json"), entry=entry)] * count,
        look=lambda settled: looks.append(settled) or [],
        names=set,
        close=lambda: None,
    )
    watch = Supervisor(
        registry=registry,
        members=Members([], max_restarts=0),
        make_client=lambda name, url: ReplicaClient(url, name, timeout_s=1),
        heartbeat_s=1,
        start_timeout_s=1,
        min_replicas=0,
    )
    with watch:
        time.sleep(1.0)
    assert least <= len(looks) <= most
