"""The watch over replicas: who joins, who leaves, and who is refused or counts as another."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megadiff.rollout.client import supervisor as supervisor_module
from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.members import Members
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.registry import Claim
from megadiff.rollout.client.report import Loss
from megadiff.rollout.client.supervisor import Supervisor
from tests.unit.rollout.supervised import peers, supervised
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("fast_watch")


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
