"""A GPU that answers is left alone; one that has stopped to is freed, and the copy goes on."""

from __future__ import annotations

import threading
import time

import torch

from megadiff.engines.stuck import called_at_silence, freed_when_stuck
from megadiff.tensors.shards import Shard
from megadiff.tensors.snapshot import Snapshot

WAIT_S = 20.0


def test_a_silent_gpu_is_freed_once() -> None:
    is_free = threading.Event()
    freed: list[float] = []

    def free() -> None:
        freed.append(time.monotonic())
        is_free.set()

    began_s = time.monotonic()
    with called_at_silence(is_free.wait, free, after_s=0.2):
        assert is_free.wait(WAIT_S)  # as a copy that ends when collectives do
        time.sleep(0.6)
    assert len(freed) == 1
    assert freed[0] - began_s >= 0.2


def test_one_that_answers_is_left_alone() -> None:
    answers: list[float] = []
    freed: list[bool] = []
    with called_at_silence(
        lambda: answers.append(time.monotonic()), lambda: freed.append(True), after_s=0.4
    ):
        time.sleep(1.5)
    assert len(answers) >= 2
    assert not freed
    time.sleep(0.5)
    num_answers = len(answers)
    time.sleep(0.5)
    assert len(answers) == num_answers  # nobody asks any more


def test_weights_on_the_host_need_nobody_to_watch() -> None:
    shard = Shard(local=torch.zeros(3), offsets=(0,), shape=(3,))
    num_threads = threading.active_count()
    with freed_when_stuck(Snapshot(shards={"weight": [shard]}, rank=0, num_files=1)):
        assert threading.active_count() == num_threads
