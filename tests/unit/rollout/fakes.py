"""Replicas without an address, for a fleet in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megadiff.rollout.client.client import Drawn, ReplicaError
from megadiff.types import Prompt, RolloutRequest, Sampling

SAMPLING = Sampling(height=64, width=64, num_inference_steps=6)
Answer = Callable[["FakeReplica", list[RolloutRequest]], object]


class FakeReplica:
    """A client whose calls end as `answer` says; each request's group is the request itself.

    waits_s: of each call, behind those of other ranks. is_silent: nothing is answered until the
    connections are closed, as by a stopped process. drawn: the requests of each answered call.
    """

    def __init__(self, name: str, answer: Answer = lambda replica, requests: None) -> None:
        self.name = name
        self.url = f"http://{name}"
        self.answer = answer
        self.waits_s = 0.0
        self.is_silent = False
        self.drawn: list[list[RolloutRequest]] = []
        self.closed = threading.Event()

    def draw(self, requests: list[RolloutRequest]) -> Drawn:
        self.wait_for_life()
        self.answer(self, requests)
        self.drawn.append(requests)
        return Drawn(
            groups=requests, engine_s=1.0 + self.waits_s, queue_s=self.waits_s, outstanding=0
        )

    def health(self) -> dict[str, Any]:
        self.wait_for_life()
        return {"name": self.name}

    say_alive = health
    trim = health

    def wait_for_life(self) -> None:
        if self.is_silent:
            self.closed.wait(30)
            raise ReplicaError(self.name, None, "the connection was closed")

    def close(self) -> None:
        self.closed.set()


def make_request(place: int, num_samples: int, *, text: str = "a cat") -> RolloutRequest:
    prompt = Prompt(text=text, id=f"{place:016x}")
    return RolloutRequest(
        prompt=prompt, sampling=SAMPLING, sample_indices=tuple(range(num_samples)), seed=0, step=0
    )
