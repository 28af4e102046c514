"""Who takes which call: every call is answered once, whatever fails, and slow replicas get fewer.

A clock of the test's own: thousands of schedules of faults take seconds.
"""

from __future__ import annotations

import itertools
import random
from statistics import fmean

import pytest
from bench_balance import (
    SAMPLES,
    fewest_calls_s,
    fluid_s,
    make_calls,
    queue_s,
    shared_ratios,
    whole_calls_s,
)

from megadiff.rollout.client.call_queue import MAX_ERRORS, MAX_LOSSES, CallQueue, ReplicaCall


def test_ten_thousand_schedules_of_faults_lose_and_double_no_call() -> None:
    """Replicas die, fail calls and drop connections at random, until all are gone or all is done;
    then new ones come, as a step brings them back.
    """
    rng = random.Random(0)
    for _ in range(10_000):
        calls = make_calls(rng.randint(1, 6))
        answered: list[ReplicaCall] = []
        rates: dict[str, float] = {}
        for generation in itertools.count():
            queue = CallQueue(calls, [f"{generation}.{index}" for index in range(3)], rates)
            play(queue, rng, answered)
            if queue.is_over or any(call.is_poisoned for call in calls):
                break
            assert queue.is_stuck
        assert len(set(answered)) == len(answered)
        done = {call for call in calls if call.is_done}
        assert set(answered) == done
        assert done == set(calls) or any(call.is_poisoned for call in calls)


def play(queue: CallQueue, rng: random.Random, answered: list[ReplicaCall]) -> None:
    """Let random things happen to a queue until it is over or stuck, or a call is poisoned."""
    running: list[tuple[ReplicaCall, str]] = []
    now_s = 0.0
    while not (queue.is_over or queue.is_stuck):
        while taken := queue.take(now_s):
            assert taken not in running and not taken[0].is_done
            running.append(taken)
        now_s += rng.random()
        call, replica = running.pop(rng.randrange(len(running)))
        chance = rng.random()
        if chance < 0.6:
            queue.succeed(call, replica, seconds=1.0, outstanding=rng.randrange(20), now_s=now_s)
            answered.append(call)
        elif chance < 0.8:
            is_lost = queue.fail(call, replica, "500", is_answer=chance < 0.7, now_s=now_s)
            if call.is_poisoned:
                return
            if is_lost:
                queue.lose(replica)
                running = [row for row in running if row[1] != replica]
        else:
            given_back = queue.lose(replica)
            assert call in given_back
            running = [row for row in running if row[1] != replica]
            if any(lost.is_poisoned for lost in given_back):
                return


def test_a_call_that_two_replicas_answer_with_an_error_is_at_fault() -> None:
    (call,) = make_calls(1)
    queue = CallQueue([call], ["a", "b", "c"], {})
    for expected in range(1, MAX_ERRORS + 1):
        assert not call.is_poisoned
        taken = queue.take(0.0)
        assert taken is not None and taken[1] not in call.errors
        queue.fail(call, taken[1], "500: out of memory", is_answer=True, now_s=0.0)
        assert call.num_errors == expected
    assert call.is_poisoned


def test_a_call_that_kills_replica_after_replica_is_at_fault() -> None:
    (call,) = make_calls(1)
    for generation in range(MAX_LOSSES):
        assert not call.is_poisoned
        queue = CallQueue([call], [str(generation)], {})
        assert queue.take(0.0)
        queue.lose(str(generation))
        assert queue.is_stuck
    assert call.is_poisoned


def test_the_call_behind_it_is_not_to_blame() -> None:
    calls = make_calls(2)
    queue = CallQueue(calls, ["a"], {"a": 1.0})
    assert queue.take(0.0) and queue.take(0.0)
    queue.lose("a")
    assert [call.num_losses for call in calls] == [1, 0]


def test_a_replica_that_fails_one_call_after_another_is_of_no_use() -> None:
    calls = make_calls(9)
    queue = CallQueue(calls, ["broken", "well"], {"broken": 0.1, "well": 0.2})
    said = []
    for _ in range(30):
        taken = queue.take(0.0)
        if taken is None:
            break
        call, replica = taken
        if replica == "broken":
            said.append(queue.fail(call, replica, "500: CUDA error", is_answer=True, now_s=0.0))
            if said[-1]:
                queue.lose("broken")
        else:
            queue.succeed(call, replica, seconds=1.6, outstanding=0, now_s=0.0)
    assert said == [False, False, True] and queue.is_over


def test_a_single_replica_that_answers_with_an_error_is_given_up_for_a_new_one() -> None:
    (call,) = make_calls(1)
    queue = CallQueue([call], ["a"], {})
    assert queue.take(0.0)
    assert queue.fail(call, "a", "500", is_answer=True, now_s=0.0)


def test_a_dropped_connection_is_tried_again_on_the_same_replica() -> None:
    (call,) = make_calls(1)
    queue = CallQueue([call], ["a"], {})
    assert queue.take(0.0)
    assert not queue.fail(call, "a", "reset", is_answer=False, now_s=0.0)
    assert queue.take(1.0) == (call, "a")


@pytest.mark.parametrize("per_replica", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_slow_replicas_hold_nobody_up(seed: int, per_replica: int) -> None:
    """64 replicas of log-normal speeds, once they are known: no schedule of whole calls is faster.

    From four calls a replica on that is within 15 % of work that could be cut to any size. With
    two, no schedule is: half a call of each replica is lost at the end.
    """
    rng = random.Random(seed)
    rates = {str(index): rng.lognormvariate(0.0, 0.5) for index in range(64)}
    num_calls = 64 * per_replica
    known: dict[str, float] = {}
    for _ in range(2):
        seconds = queue_s(CallQueue(make_calls(num_calls), rates, known), rates)
    ideal_s = fluid_s(rates, num_calls * SAMPLES)
    assert ideal_s < whole_calls_s(rates, num_calls) <= seconds * 1.000001
    assert seconds <= 1.01 * whole_calls_s(rates, num_calls)
    assert seconds <= (1.15 if per_replica >= 4 else 1.3) * ideal_s
    assert seconds < 0.75 * fewest_calls_s(rates, num_calls)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_ranks_that_share_equal_replicas_give_each_as_many_calls(num_ranks: int) -> None:
    """A wait behind other ranks' calls is not a replica's slowness; taken for it, shares differ."""
    ratios = [fmean(shared_ratios(num_ranks, 8, seed=seed)) for seed in range(5)]
    blind = [fmean(shared_ratios(num_ranks, 8, seed=seed, counts_waits=True)) for seed in range(5)]
    assert max(ratios) < 1.02 < 1.04 < fmean(blind)


def test_the_bound_of_whole_calls_is_the_least_of_all_schedules() -> None:
    rates = {"a": 1.0, "b": 1.7, "c": 3.1}
    schedules = itertools.product(rates, repeat=6)
    least_s = min(
        max(rates[name] * SAMPLES * schedule.count(name) for name in rates)
        for schedule in schedules
    )
    assert whole_calls_s(rates, 6) == pytest.approx(least_s)


def test_a_slow_replica_gets_no_last_call_that_a_fast_one_ends_sooner() -> None:
    """At a step's end a call waits for the fast one, although the slow one is idle."""
    calls = make_calls(3)
    queue = CallQueue(calls, ["slow", "fast"], {"slow": 10.0, "fast": 1.0})
    given = []
    while taken := queue.take(0.0):
        given.append(taken[1])
    assert given == ["fast", "fast"] and not queue.is_stuck
    queue.succeed(calls[0], "fast", seconds=8.0, outstanding=8, now_s=8.0)
    assert queue.take(8.0) == (calls[2], "fast")
