"""How busy replicas were, from what ranks that share them know of their own calls."""

import pytest

from megadiff.rollout.client.call_queue import ReplicaCall
from megadiff.rollout.server.load import Load
from megadiff.train.replica_figures import MOST_NAMED, draw_work, replica_figures


def call(replica: str, engine_s: float, queue_s: float = 0.0) -> ReplicaCall:
    return ReplicaCall([0], 4, replica=replica, engine_s=engine_s, queue_s=queue_s)


def test_a_replica_of_two_ranks_is_as_busy_as_both_make_it():
    """The second rank's call waits behind the first one's: 3 + 3 s of 8, and 8 s of 8."""
    names = ["node-a.b", "node_b", "idle"]
    first = draw_work([call("node-a.b", 3), call("node_b", 8)], names=names, drawing_s=8)
    second = draw_work([call("node-a.b", 6, 3), ReplicaCall([1], 4)], names=names, drawing_s=6.5)
    figures = replica_figures([first, None, second])
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
    assert replica_figures([work, work], names=["a", "b"])["perf/replica_idle_share/b"] == 1


def test_nothing_drawn_and_crowds_have_no_names():
    assert replica_figures([None]) == {}
    assert replica_figures([draw_work([ReplicaCall([0], 4)], names=["a"], drawing_s=1)]) == {}
    calls = [call(f"replica_{index}", 1) for index in range(MOST_NAMED + 1)]
    assert replica_figures([draw_work(calls, names=[], drawing_s=2)]) == {
        "perf/replica_idle_share": 0.5,
        "perf/replica_queue_s": 0,
    }


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
