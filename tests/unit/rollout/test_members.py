"""The life of a run's replicas: nobody takes a place that is not free; a death is not for ever."""

from __future__ import annotations

import random

import pytest

from megadiff.rollout.client.members import Members, Phase


def test_ten_thousand_random_lives_keep_the_rules() -> None:
    """One process a name, started only where the one before is gone for good; who is out stays."""
    rng = random.Random(0)
    for _ in range(10_000):
        members = Members(["a", "b"], max_restarts=2)
        alive = {"a", "b"}
        out: set[str] = set()
        now_s = 0.0
        for _ in range(rng.randint(1, 25)):
            now_s += 40 * rng.random()
            name = rng.choice("abc")
            deed = rng.choice(["join", "lose", "kill", "start", "work"])
            url = f"http://{name}:{rng.randint(1, 2)}"
            if deed == "join" and members.may_join(name, url, now_s):
                assert name not in out or name == "c"
                assert name in alive or name == "c"
                members.join(name, url, now_s)
                assert members.roster[name] == url
            elif deed == "lose" and members.lose(name, "gone", now_s):
                assert name not in members.roster
            elif deed == "kill":
                for lost in members.lost():
                    alive.discard(lost)
                    members.end(lost, now_s)
            elif deed == "start":
                for due in members.due(now_s):
                    assert due not in alive
                    alive.add(due)
                    members.started(due, now_s)
            elif deed == "work":
                members.worked(members.roster)
            assert set(members.roster) <= alive | {"c"}
            out |= {row.name for row in members.members.values() if row.phase is Phase.OUT}
            assert not out & members.roster.keys() - {"c"}


def test_a_replica_comes_back_after_a_pause_that_grows() -> None:
    members = Members(["a"], max_restarts=3)
    members.join("a", "http://a:1", 0.0)
    pauses = []
    now_s = 0.0
    for _ in range(3):
        assert members.lose("a", "killed", now_s)
        assert not members.lose("a", "killed", now_s)  # said once
        assert members.due(now_s) == []  # its process is still there
        members.end("a", now_s)
        pause_s = 0.0
        while not members.due(now_s + pause_s):
            pause_s += 0.5
        pauses.append(pause_s)
        now_s += pause_s
        members.started("a", now_s)
    assert pauses == [1.0, 2.0, 4.0]

    members.lose("a", "killed again", now_s)
    members.end("a", now_s)
    assert members.due(now_s + 1e6) == [] and members.coming == []
    assert members.reasons() == {"a": "out: killed again"}


def test_a_finished_step_clears_the_deaths_before_it() -> None:
    members = Members(["a"], max_restarts=1)
    for now_s in range(0, 1000, 100):
        members.join("a", f"http://a:{now_s}", float(now_s))
        members.worked({"a": f"http://a:{now_s}"})
        members.lose("a", "killed", float(now_s))
        members.end("a", float(now_s))
        assert members.due(now_s + 50.0) == ["a"]
        members.started("a", now_s + 50.0)


def test_others_join_leave_and_come_back() -> None:
    members = Members(max_restarts=3)
    members.join("far", "http://far:1", 0.0)
    assert not members.may_join("far", "http://far:1", 1.0)
    members.leave("far")
    assert members.roster == {}

    members.join("far", "http://far:1", 2.0)
    members.lose("far", "silent", 3.0)
    assert members.coming == [] and members.lost() == []  # nobody here can end or start it
    assert not members.may_join("far", "http://far:1", 3.5)
    assert members.may_join("far", "http://far:1", 4.0)  # it woke up: it gets the policy first


def test_who_is_refused_stays_out_until_it_is_another_process() -> None:
    members = Members(max_restarts=3)
    members.refuse("odd", "http://odd:1", "fp8=True", 0.0)
    assert not members.may_join("odd", "http://odd:1", 100.0)
    assert members.may_join("odd", "http://odd:2", 100.0)


@pytest.mark.parametrize("late_s", [10.0, 10.1])
def test_one_that_does_not_become_ready_is_overdue(late_s: float) -> None:
    members = Members(["a"], max_restarts=3)
    assert members.overdue(late_s, start_timeout_s=10.0) == (["a"] if late_s > 10 else [])
