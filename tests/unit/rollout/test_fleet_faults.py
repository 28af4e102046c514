"""Calls that fail: they are made again elsewhere, and what is at fault is named."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megadiff.process.bounded_http import TIMED_OUT
from megadiff.rollout.client import fleet as fleet_module
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.client.fleet import CallFailed, Fleet
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.pulse import Pulse
from megadiff.rollout.client.report import HUNG, Loss
from megadiff.rollout.limits import GROUP_BROKE
from megadiff.sync.transports.base import GroupBrokeError
from megadiff.types import RolloutRequest
from tests.unit.process.strangers import Stranger, reply
from tests.unit.rollout.fakes import Answer, FakeReplica, make_request


def fail(status: int | None, text: str) -> Answer:
    def answer(replica: FakeReplica, requests: list[RolloutRequest]) -> None:
        raise ReplicaError(replica.name, status, text)

    return answer


def fleet_of(*replicas: FakeReplica, **options: Any) -> Fleet:
    return Fleet(replicas, batch_size=2, num_replicas=2, **options)


REQUESTS = [make_request(place, 2, text=f"prompt {place}") for place in range(6)]
IDS = [request.prompt.id for request in REQUESTS]


@pytest.mark.parametrize(
    ("status", "text", "is_lost"),
    [
        (None, "the connection broke", False),
        (500, "CUDA error: an illegal memory access", False),
        (409, "it holds version 3, and 4 was asked for", True),
        (423, "another run works with it", True),
        (TIMED_OUT, "no whole answer within 1800 s", True),
    ],
)
def test_a_failed_call_is_made_again_with_the_same_requests(caplog, status, text, is_lost) -> None:
    """By replica a; no sample is lost or drawn twice, and both calls hold the same requests."""
    failures = [fail(status, text)]
    asked: list[list[str]] = []

    def answer(replica: FakeReplica, requests: list[RolloutRequest]) -> None:
        asked.append([request.prompt.id for request in requests])
        if replica.name == "a" and failures:
            failures.pop()(replica, requests)

    events = []
    replicas = [FakeReplica("a", answer), FakeReplica("b", answer)]
    with fleet_of(*replicas, report=lambda kind, **fields: events.append((kind, fields))) as fleet:
        arrived = dict(fleet.generate(REQUESTS))
        assert set(fleet.lost) == ({"http://a"} if is_lost else set())
    assert [arrived[index] for index in range(6)] == REQUESTS
    drawn = [request.prompt.id for replica in replicas for (request,) in replica.drawn]
    assert sorted(drawn) == sorted(IDS)
    assert len(asked) == 7 and len(set(map(tuple, asked))) == 6
    assert text in caplog.text
    kinds = [(kind, fields["replica"]) for kind, fields in events]
    assert kinds and set(kinds) == {("call_retried", "a")}


def test_a_poisoned_request_is_named_and_the_fleet_spared() -> None:
    def answer(replica: FakeReplica, requests: list[RolloutRequest]) -> None:
        if requests[0].prompt.id == IDS[3]:
            fail(500, "NaN in the latents")(replica, requests)

    text = (
        rf"the call with prompts {IDS[3]} \('prompt 3'\) failed 2 times on living replicas and 0 "
        r"times with their connections: [ab] answered 500: NaN in the latents; [ab] answered 500: "
        r"NaN in the latents\. Take these prompts out, or look at the replicas' logs"
    )
    with fleet_of(FakeReplica("a", answer), FakeReplica("b", answer)) as fleet:
        with pytest.raises(CallFailed, match=text):
            list(fleet.generate(REQUESTS))
        assert fleet.lost == {}


@pytest.mark.parametrize("status", [400, 413])
def test_a_mistake_of_ours_is_not_made_again(status) -> None:
    replicas = [FakeReplica(name, fail(status, "width=63")) for name in "ab"]
    with fleet_of(*replicas) as fleet, pytest.raises(ReplicaError, match=f"{status}: width=63"):
        list(fleet.generate(REQUESTS))


@pytest.mark.parametrize("status", [401, 404])
def test_another_service_at_a_lost_replicas_address_ends_no_step(status) -> None:
    foreign = FakeReplica("b", fail(status, "no such page"))
    foreign.health = lambda: {"name": "nginx"}
    with fleet_of(FakeReplica("a"), foreign) as fleet:
        drawn = list(fleet.generate(REQUESTS))
        assert len(drawn) == len(REQUESTS) and set(fleet.lost) == {"http://b"}


def test_all_replicas_lost_in_mid_step_and_others_finish_it() -> None:
    """The draw ends early; the calls that are done are not made again by who comes back."""
    left = [2]

    def answer(replica: FakeReplica, requests: list[RolloutRequest]) -> None:
        if not left[0]:
            fail(TIMED_OUT, "gone")(replica, requests)
        left[0] -= 1

    with fleet_of(FakeReplica("a", answer)) as fleet:
        calls = fleet.plan(REQUESTS)
        first = dict(fleet.generate(REQUESTS, calls))
        # The second answer may come after the failure of the call behind it.
        assert len(first) in (1, 2) and fleet.lost == {
            "http://a": Loss("a answered 504: gone", HUNG)
        }
        later = FakeReplica("a")
        fleet.set_replicas([later])
        rest = dict(fleet.generate(REQUESTS, calls))
    assert sorted([*first, *rest]) == list(range(6)) and len(later.drawn) == 6 - len(first)


def test_a_stopped_replica_is_lost_after_its_heartbeat() -> None:
    stopped = FakeReplica("a")
    stopped.is_silent = True
    began = time.monotonic()
    with fleet_of(stopped, FakeReplica("b"), heartbeat_s=1.0) as fleet:
        assert len(dict(fleet.generate(REQUESTS))) == 6
        reason = "it has not answered for 1 s, rollout.heartbeat_s=1"
        assert fleet.lost == {"http://a": Loss(reason, HUNG)}
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("is_late", [False, True])
def test_one_that_hangs_or_is_late_in_a_push_is_lost_too(is_late) -> None:
    """Else the push would wait for rollout.request_timeout_s, and end the run."""
    replica = FakeReplica("a")
    replica.is_silent = not is_late
    with fleet_of(replica, heartbeat_s=0.5) as fleet:
        call = (lambda client: fail(TIMED_OUT, "late")(client, [])) if is_late else FakeReplica.trim
        with pytest.raises(ReplicaDied, match="a at http://a does not answer"):
            fleet.call(replica, call)
        assert set(fleet.lost) == {"http://a"}


def test_a_connection_that_opened_while_the_others_were_closed_is_closed_too() -> None:
    """Else the call would wait in it for rollout.request_timeout_s."""
    replica = FakeReplica("a")
    replica.is_silent = True
    num_closed = []

    def close() -> None:
        num_closed.append(1)
        if len(num_closed) > 1:
            replica.closed.set()

    replica.close = close  # type: ignore[method-assign]
    with fleet_of(replica, heartbeat_s=0.5) as fleet:
        began_s = time.monotonic()
        with pytest.raises(ReplicaDied, match="the connection was closed"):
            fleet.call(replica, FakeReplica.trim)
        assert time.monotonic() - began_s < 10


def test_an_interrupted_draw_leaves_no_replica_drawing(monkeypatch) -> None:
    """The next call would wait behind it. The replica is well, and serves that one."""
    drawing = threading.Event()
    hung_up = threading.Event()

    def answer(handler: Any, _: bytes) -> None:
        if handler.path == "/health":
            reply(handler, b'{"name": "a"}')
        else:
            drawing.set()
            handler.connection.settimeout(20)
            if not handler.connection.recv(1):
                hung_up.set()

    def interrupt(*_: object, **__: object) -> None:
        drawing.wait(10)
        raise KeyboardInterrupt

    with Stranger(answer) as stranger:
        client = ReplicaClient(stranger.url, "a")
        with Fleet([client], batch_size=2, heartbeat_s=None) as fleet:
            monkeypatch.setattr(fleet_module, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(fleet.generate(REQUESTS))
            assert hung_up.wait(5)
            assert fleet.lost == {} and client.say_alive() == {"name": "a"}


@pytest.mark.parametrize("has_served", [True, False])
def test_one_that_fails_in_a_push_is_lost_where_it_has_taken_one_before(has_served) -> None:
    """Another process in its place can take this one. A first push may fit nobody: no retry."""
    replica = FakeReplica("a")
    replica.weights_commit = lambda version, digests: [{"digest": "d"}]
    replica.weights_bucket = lambda bucket: fail(500, "no space left on device")(replica, [])
    with fleet_of(replica, heartbeat_s=5.0) as fleet:
        (target,) = fleet.weight_targets()
        if has_served:
            target.weights_commit(1, ["d"])
        (target,) = fleet.weight_targets()  # of a sync that was built anew
        error = ReplicaDied if has_served else ReplicaError
        with pytest.raises(error, match="a answered 500: no space left on device"):
            target.weights_bucket({})
        assert set(fleet.lost) == ({"http://a"} if has_served else set())

        replica.weights_bucket = lambda bucket: fail(409, "version 3")(replica, [])
        fleet.set_replicas([replica])
        with pytest.raises(ReplicaError, match="a answered 409"):  # a mistake of the trainer's
            target.weights_bucket({})
        assert fleet.lost == {}


def test_one_that_waited_in_vain_is_lost_when_the_transport_says_so() -> None:
    replica = FakeReplica("a")
    fails = fail(GROUP_BROKE, "nothing came")
    replica.weights_begin = lambda *_, **__: fails(replica, [])
    replica.weights_bucket = lambda bucket: fails(replica, [])
    replica.weights_commit = lambda version, digests: [{"digest": "d"}]
    with fleet_of(replica, heartbeat_s=5.0) as fleet:
        (target,) = fleet.weight_targets()
        assert not target.has_served
        target.weights_commit(1, ["d"])
        assert target.has_served
        for call in (
            lambda: target.weights_begin(2, b"", lora=None, transport={}),
            lambda: target.weights_bucket({}),
        ):
            with pytest.raises(GroupBrokeError, match="a answered 424: nothing came"):
                call()
        assert fleet.lost == {}
        target.lose("nothing came")
        assert fleet.lost["http://a"].reason == "nothing came"


def test_a_long_update_is_no_silence_of_the_replicas() -> None:
    """Nobody asks them meanwhile; the first question after it may take a moment."""

    def answer(replica: FakeReplica, requests: list[RolloutRequest]) -> None:
        time.sleep(0.5)  # long enough to be asked

    with fleet_of(FakeReplica("a", answer), heartbeat_s=1.0) as fleet:
        for _ in range(2):
            assert len(dict(fleet.generate(REQUESTS[:2]))) == 2
            time.sleep(1.5)
        assert fleet.lost == {}


def test_a_silence_begins_with_a_question() -> None:
    """And ends with any answer; an engine without progress is told by the replica itself."""
    replica = FakeReplica("a")
    pulse = Pulse(0.4)

    def ask_for(seconds: float) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            hung = pulse.hung([replica])
            time.sleep(0.02)
        assert all(loss.kind == HUNG for loss in hung.values())
        return {url: loss.reason for url, loss in hung.items()}

    assert ask_for(0.3) == {}
    time.sleep(0.6)
    assert ask_for(0.1) == {}

    replica.say_alive = lambda: {"engine_silent_s": 7.0}
    assert "its engine has made no progress for 7 s" in ask_for(0.3)["http://a"]

    replica.say_alive = lambda: fail(401, "another token")(replica, [])
    pulse.hung([])
    assert ask_for(0.6) == {}

    replica.say_alive = lambda: fail(None, "refused")(replica, [])
    assert "it has not answered for" in ask_for(0.7)["http://a"]
    assert pulse.hung([]) == {}  # asked no more
    assert ask_for(0.1) == {}
    pulse.close()


def test_fakes_have_the_clients_methods() -> None:
    for name in ("weights_commit", "weights_bucket"):
        assert callable(getattr(ReplicaClient, name))
    for name in ("draw", "health", "say_alive", "trim", "close"):
        assert callable(getattr(ReplicaClient, name)) and callable(getattr(FakeReplica, name))
