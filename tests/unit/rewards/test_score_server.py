"""What serves a reward: its turns, its answers, and what it refuses."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.rewards import server as score_server
from megadiff.rewards.base import Reward, ScoreFailed, build_reward
from tests.unit.rewards.byte_reward import ByteReward
from tests.unit.rewards.far_reward import remote, serving

pytestmark = pytest.mark.slow  # most of it waits for servers that do not answer


class Busy(Reward):
    """Count the calls that run at once."""

    workers = 2
    samples_per_call = 1

    def __init__(self):
        self.lock = threading.Lock()
        self.now = 0
        self.most = 0
        self.calls = 0

    def score(self, samples):
        with self.lock:
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self.lock:
            self.now -= 1
        return [0.5]


def test_as_many_calls_run_at_once_as_the_reward_has_workers(samples):
    busy = Busy()
    with serving(busy) as url, contextlib.closing(remote(url)) as far:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: far.score(samples[:2]), range(8)))
    assert answers == [[0.5, 0.5]] * 8
    assert busy.most == 2
    assert busy.calls == 16


class Shifts(Reward):
    """Answer 3 values and then 1 for calls of 2, or texts."""

    samples_per_call = 2

    def __init__(self, *answers):
        self.answers = list(answers)

    def score(self, samples):
        return self.answers.pop(0)


@pytest.mark.parametrize("answers", [([1, 2, 3], [9]), (["0.5", "0.7"],), ([1.0, float("nan")],)])
def test_answers_are_checked_where_they_are_made(samples, answers):
    """A chunk that is too long and one that is too short would be as many as were asked for."""
    with serving(Shifts(*answers)) as url, contextlib.closing(remote(url)) as far:
        with pytest.raises(ScoreFailed, match="answered 422.*returned"):
            far.score(samples[:4])


def test_who_has_left_is_not_scored(samples):
    """A server that is behind does not spend its time on requests that are asked again."""
    busy = Busy()
    with serving(busy) as url:
        impatient = remote(url, timeout_s=0.12, deadline_s=0.12)
        with contextlib.closing(impatient), ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(impatient.score, samples) for _ in range(8)]
        assert all(isinstance(call.exception(), ScoreFailed) for call in calls)
    assert busy.calls < 8 * 4 / 2


def test_a_reward_that_hangs_does_not_hang_the_others(samples, monkeypatch):
    monkeypatch.setattr(score_server, "QUEUE_S", 0.1)
    over = threading.Event()

    class Hangs(Reward):
        workers = 1

        def score(self, samples):
            over.wait()
            return [0.5] * len(samples)

    with serving(Hangs()) as url, contextlib.closing(remote(url, deadline_s=20)) as patient:
        impatient = remote(url, timeout_s=1, deadline_s=1)
        with contextlib.closing(impatient), ThreadPoolExecutor(4) as threads:
            first = threads.submit(patient.score, samples)
            time.sleep(0.1)
            others = [threads.submit(impatient.score, samples) for _ in range(3)]
            for other in others:
                assert "no turn within 0.1 s: the reward may hang" in str(other.exception())
            over.set()
            assert first.result() == [0.5] * 4


def test_what_a_reward_raises(samples):
    """A failed sample is null, ValueError is the request's fault, anything else may pass."""
    errors = [ScoreFailed("it is asleep"), MemoryError("full"), ValueError("no such language")]

    class Raises(Reward):
        def score(self, samples):
            if errors:
                raise errors.pop(0)
            return torch.full((len(samples),), 0.25)

    with serving(Raises()) as url, contextlib.closing(remote(url)) as far:
        assert far.score(samples) == [None] * 4
        with pytest.raises(ScoreFailed, match="answered 422.*no such language"):
            far.score(samples)
        assert far.figures() == {"retries": 1.0}
        assert far.score(samples) == [0.25] * 4


def test_a_prompt_that_the_reward_refuses_is_refused_before_it_is_scored(samples):
    """At the client another reward stands, which refuses nothing."""
    busy = Busy()

    def validate(prompts):
        raise ValueError(f"{len(prompts)} prompts without a quoted text")

    busy.validate = validate
    with serving(busy) as url, contextlib.closing(remote(url)) as far:
        with pytest.raises(ScoreFailed, match="answered 422.*1 prompts without a quoted text"):
            far.score(samples)
    assert not busy.calls


def test_a_frame_that_a_server_within_the_server_gave_up_is_a_failed_sample(samples):
    """Reward frame hands on what the other one raised; asking again would be useless."""
    frame = build_reward("frame", RewardConfig(type="frame", args={"reward": "color"}))

    def asleep(samples):
        raise ScoreFailed("it is asleep")

    frame.inner.score = asleep
    with serving(frame) as url, contextlib.closing(remote(url)) as far:
        assert far.score(samples) == [None] * 4
        assert far.figures() == {"retries": 0.0}


def test_a_request_that_is_too_large_is_refused(samples, monkeypatch):
    monkeypatch.setattr(score_server, "MAX_BYTES", 1000)
    big = [replace(samples[0], pixels=np.zeros((1, 1024, 2048, 3), np.uint8))]
    with serving(ByteReward()) as url:
        with contextlib.closing(remote(url)) as far:
            with pytest.raises(ScoreFailed, match="413: .*at most 1000 are taken; send fewer samp"):
                far.score(big)
