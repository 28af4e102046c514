"""How busy replicas were, from what ranks that share them know of their own calls."""

import pytest

from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.rollout.server.load import Load
from megadiff.train.replica_figures import (
    MOST_NAMED,
    SLOW_STEPS,
    Calls,
    SlowReplicas,
    calls_of_all,
    draw_work,
    replica_figures,
)


def call(replica: str, engine_s: float, queue_s: float = 0.0) -> ReplicaCall:
    return ReplicaCall([0], 4, replica=replica, engine_s=engine_s, queue_s=queue_s)


def test_a_replica_of_two_ranks_is_as_busy_as_both_make_it():
    """The second rank's call waits behind the first one's: 3 + 3 s of 8, and 8 s of 8."""
    names = ["node-a.b", "node_b", "idle"]
    first = draw_work([call("node-a.b", 3), call("node_b", 8)], names=names, drawing_s=8)
    second = draw_work([call("node-a.b", 6, 3), ReplicaCall([1], 4)], names=names, drawing_s=6.5)
    figures = replica_figures(calls_of_all([first, None, second]), drawing_s=8)
    assert figures == pytest.approx(
        {
            "perf/replica_idle_share": (0.25 + 0 + 1) / 3,
            "perf/replica_idle_share/node_a_b": 0.25,
            "perf/replica_idle_share/node_b": 0,
            "perf/replica_idle_share/idle": 1,
            "perf/replica_queue_s": (1.5 + 0) / 2,
            "perf/replica_queue_s/node_a_b": 1.5,
            "perf/replica_queue_s/node_b": 0,
        }
    )


def test_idle_replicas_that_no_rank_has_called_are_named_once():
    work = draw_work([call("a", 2)], drawing_s=2)
    assert list(work["calls"]) == ["a"]
    calls = calls_of_all([work, work], names=["a", "b"])
    assert replica_figures(calls, drawing_s=4)["perf/replica_idle_share/b"] == 1


def test_nothing_drawn_and_crowds_have_no_names():
    assert replica_figures(calls_of_all([None]), drawing_s=1) == {}
    lost = draw_work([ReplicaCall([0], 4)], names=["a"], drawing_s=1)
    assert replica_figures(calls_of_all([lost]), drawing_s=1) == {}
    assert replica_figures(crowd(MOST_NAMED + 1, slow_s=1), drawing_s=2) == {
        "perf/replica_idle_share": 0.5,
        "perf/replica_queue_s": 0,
        "perf/replica_slowest_ratio": 1,
    }


def crowd(count: int, *, slow_s: float) -> Calls:
    """Return a draw in which each replica made a call of 1 s, and replica_0 one of slow_s."""
    seconds = [slow_s] + [1.0] * (count - 1)
    calls = [call(f"replica_{index}", engine_s) for index, engine_s in enumerate(seconds)]
    return calls_of_all([draw_work(calls, drawing_s=2)])


@pytest.mark.parametrize("count", [3, 480])
def test_one_slow_replica_shows_at_any_number_of_them(count):
    figures = replica_figures(crowd(count, slow_s=5), drawing_s=5)
    assert figures["perf/replica_slowest_ratio"] == 5


def test_speed_is_of_samples_and_without_waiting():
    """A call of half the samples in half the time is as fast, and so is one that waited."""
    half = ReplicaCall([0], 2, replica="half", engine_s=0.5)
    calls = [call("a", 1), call("waited", 9, queue_s=8), half]
    figures = replica_figures(calls_of_all([draw_work(calls, drawing_s=9)]), drawing_s=9)
    assert figures["perf/replica_slowest_ratio"] == 1


def test_of_two_replicas_nobody_says_which_is_slow():
    reports: list[str] = []
    watch = SlowReplicas(lambda kind, **fields: reports.append(kind))
    for _ in range(SLOW_STEPS):
        watch.note(crowd(2, slow_s=5))
    assert not reports
    assert "perf/replica_slowest_ratio" not in replica_figures(crowd(2, slow_s=5), drawing_s=5)


def test_a_replica_that_stays_slow_is_reported_once_until_it_recovers(caplog):
    reports: list[tuple[str, str, str]] = []
    watch = SlowReplicas(
        lambda kind, *, replica, text: reports.append((kind, replica, text)),
    )

    def note(slow_s: float, steps: int) -> int:
        for _ in range(steps):
            watch.note(crowd(480, slow_s=slow_s))
        return len(reports)

    assert note(5, SLOW_STEPS - 1) == 0
    assert note(1, 1) == 0  # it was well in between
    assert note(5, SLOW_STEPS - 1) == 0
    assert note(5, 1) == 1
    kind, replica, text = reports[0]
    assert (kind, replica) == ("replica_slow", "replica_0")
    assert text.startswith("1.25 s a sample, the median of 480 replicas is 0.25 s")
    assert "replica_0 is slow: 1.25 s a sample" in caplog.text

    assert note(5, 2 * SLOW_STEPS) == 1
    assert note(1.5, 1) == 1
    assert note(5, SLOW_STEPS) == 2
    watch.note(calls_of_all([], names=["replica_1"]))  # it has left
    assert note(5, SLOW_STEPS) == 3


def test_a_call_waits_until_the_one_before_it_is_done():
    now = [0.0]
    load = Load(lambda: now[0])
    with load.drawing(4):
        now[0] = 1.0
        second = load.drawing(4)
        second.__enter__()
        now[0] = 3.0
    assert load.waited_s(0.0) == 3.0 and load.waited_s(1.0) == 2.0
    now[0] = 5.0
    second.__exit__(None, None, None)
    assert load.waited_s(6.0) == 0  # that came when nothing was on
