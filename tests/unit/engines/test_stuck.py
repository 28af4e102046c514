"""A GPU that answers is left alone; one that has stopped to is freed, and the copy goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megadiff.engines.gate import StepGate
from megadiff.engines.stuck import called_at_silence

WAIT_S = 20.0


def test_a_silent_gpu_is_freed_once() -> None:
    is_free = threading.Event()
    freed: list[float] = []

    def answers() -> Iterator[None]:
        is_free.wait()
        yield

    def free() -> None:
        freed.append(time.monotonic())
        is_free.set()

    began_s = time.monotonic()
    with called_at_silence(answers(), free, after_s=0.2):
        assert is_free.wait(WAIT_S)  # as a copy that ends when collectives do
        time.sleep(0.6)
    assert len(freed) == 1
    assert freed[0] - began_s >= 0.2


def test_one_that_answers_is_left_alone() -> None:
    asked: list[float] = []
    freed: list[bool] = []

    def answers() -> Iterator[None]:
        while True:
            asked.append(time.monotonic())
            yield

    with called_at_silence(answers(), lambda: freed.append(True), after_s=0.4):
        time.sleep(1.5)
    assert len(asked) >= 2
    assert not freed
    time.sleep(0.5)
    num_asked = len(asked)
    time.sleep(0.5)
    assert len(asked) == num_asked  # nobody asks any more


def test_one_that_raises_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    freed: list[bool] = []

    def answers() -> Iterator[None]:
        yield
        raise RuntimeError("an illegal address")

    with called_at_silence(answers(), lambda: freed.append(True), after_s=0.2):
        time.sleep(1.0)
    assert not freed
    assert "not watched any more: an illegal address" in caplog.text


def test_weights_on_the_host_need_nobody_to_watch() -> None:
    num_threads = threading.active_count()
    with StepGate(torch.device("cpu")).after_changes():
        assert threading.active_count() == num_threads
