"""Two runs never use one replica at a time, and one that is gone does not keep it."""

from __future__ import annotations

import pytest

from megadiff.rollout.limits import LOCKED, OWNER_SILENT_S
from megadiff.rollout.server.owner import Owner
from megadiff.rollout.server.policy import Refused


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def owner(clock: Clock) -> Owner:
    """Hands on a replica that run a pushes to."""
    owner = Owner(clock)
    owner.check_begin("a")
    owner.take("a")
    return owner


def begins(owner: Owner, run: str) -> bool:
    try:
        owner.check_begin(run)
    except Refused as error:
        assert error.status == LOCKED
        return False
    owner.take(run)
    return True


def test_nobody_owns_a_fresh_replica(clock: Clock) -> None:
    owner = Owner(clock)
    for run in ("", "a"):
        owner.check(run)
        owner.check_generate(run, -1)
    assert owner.run is None and not owner.release("a")


def test_another_run_waits_until_the_owner_was_silent(owner: Owner, clock: Clock) -> None:
    clock.now_s += OWNER_SILENT_S - 1
    with pytest.raises(Refused, match="run b cannot have .* run a works .* heard 59 s") as error:
        owner.check_begin("b")
    assert "rollout.registry" in str(error.value) and "60 s" in str(error.value)
    owner.hear("b")  # says nothing about run a
    clock.now_s += 1
    assert begins(owner, "b")
    assert owner.run == "b"


def test_each_sign_of_life_counts(owner: Owner, clock: Clock) -> None:
    for _ in range(3):
        clock.now_s += OWNER_SILENT_S - 1
        owner.hear("a")
    assert not begins(owner, "b")


def test_a_call_in_flight_keeps_the_replica_and_a_failed_one_is_no_sign(
    owner: Owner, clock: Clock
) -> None:
    with pytest.raises(ConnectionError), owner.calling("a"):
        clock.now_s += 10 * OWNER_SILENT_S
        assert not begins(owner, "b")
        raise ConnectionError
    assert begins(owner, "b")


def test_weights_of_another_run_are_never_an_answer(owner: Owner, clock: Clock) -> None:
    owner.check_generate("a", 7)
    for run in ("b", ""):
        for version in (7, None):
            with pytest.raises(Refused, match="works for run a since 0 s, and holds its"):
                owner.check_generate(run, version)
    owner.release("a")
    with pytest.raises(Refused, match="has to push its own weights first"):
        owner.check_generate("b", 7)
    owner.check_generate("b", None)  # whatever is there


def test_the_run_that_lost_its_replica_learns_to_whom(owner: Owner, clock: Clock) -> None:
    clock.now_s += OWNER_SILENT_S
    assert begins(owner, "b")
    clock.now_s += 12
    for check in (owner.check, lambda run: owner.check_generate(run, 7)):
        with pytest.raises(Refused, match="for run b since 12 s, which took it from run a"):
            check("a")


def test_the_same_run_comes_back_at_once(owner: Owner) -> None:
    with owner.calling("a"):
        assert begins(owner, "a")


def test_a_released_replica_is_the_next_runs(owner: Owner) -> None:
    with owner.calling("a"):
        assert not owner.release("b")
        assert owner.release("a")
        assert begins(owner, "b")
    assert not begins(owner, "c")  # a call of run a that ends is none of run b
    with owner.calling("b"):
        pass
    assert not begins(owner, "a")
