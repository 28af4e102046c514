"""The watch over replicas: who is ended and started again, and what the user is told."""

from __future__ import annotations

import time

import pytest

from megadiff.rollout.client.client import ReplicaClient
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.report import HUNG, Loss
from tests.unit.rollout.supervised import peers, supervised
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("fast_watch")


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
