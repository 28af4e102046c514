"""A target that owes an answer and is silent is hung up on; a busy one is waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megadiff.sync.transports.base import HttpTransport, SyncError

HEARTBEAT_S = 0.4
BUCKET = [("a", torch.ones(4))]


class Target:
    """Answers a bucket when its connections are closed, or after `busy_s`."""

    name, url = "replica_0", "http://127.0.0.1:1"

    def __init__(self, *, busy_s: float, is_alive: bool) -> None:
        self.busy_s = busy_s
        self.is_alive = is_alive
        self.closed = threading.Event()

    def health(self):
        if not self.is_alive:
            raise ConnectionError("silent")
        return {}

    def hang_up(self, reason: str) -> None:
        self.closed.set()

    def weights_bucket(self, bucket) -> None:
        if self.closed.wait(self.busy_s):
            raise ConnectionError("closed")


def watching() -> bool:
    return any(thread.name == "weights-watch" for thread in threading.enumerate())


def assert_no_watch() -> None:
    deadline = time.monotonic() + 20
    while watching():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_target_is_named_within_its_heartbeat():
    silent = Target(busy_s=60, is_alive=False)
    other = Target(busy_s=0, is_alive=True)
    other.name = "replica_1"
    start_s = time.monotonic()
    with pytest.raises(SyncError, match="replica_0 at .* gave no sign of life for .* is it stopp"):
        HttpTransport([other, silent], heartbeat_s=HEARTBEAT_S).send(BUCKET)
    assert time.monotonic() - start_s < 20
    assert not other.closed.is_set()
    assert_no_watch()


def test_a_busy_target_is_waited_for():
    busy = Target(busy_s=4 * HEARTBEAT_S, is_alive=True)
    transport = HttpTransport([busy], heartbeat_s=HEARTBEAT_S)
    transport.send(BUCKET)
    assert not busy.closed.is_set() and not transport.watch.reasons
    assert_no_watch()


def test_a_target_that_woke_up_has_a_heartbeat_again():
    target = Target(busy_s=60, is_alive=False)
    transport = HttpTransport([target], heartbeat_s=HEARTBEAT_S)
    with pytest.raises(SyncError, match="gave no sign of life"):
        transport.send(BUCKET)
    target.closed.clear()
    target.busy_s = 0
    transport.send(BUCKET)
    assert not transport.watch.reasons
