import time

import pytest

from megadiff.observe.timers import Timers


def test_nested_timers_add_up_and_pop_starts_anew():
    timers = Timers()
    with timers("step"):
        for _ in range(2):
            with timers("rollout"):
                time.sleep(0.01)
    seconds = timers.pop()
    assert seconds.keys() == {"time/step_s", "time/rollout_s"}
    assert 0.02 <= seconds["time/rollout_s"] <= seconds["time/step_s"]
    assert timers.pop() == {}


def test_a_block_that_raises_is_timed_and_its_name_is_free_again():
    timers = Timers()
    with pytest.raises(KeyError), timers("train"):
        raise KeyError
    with timers("train"):
        pass
    assert timers.pop()["time/train_s"] >= 0


def test_a_running_timer_cannot_start_twice():
    timers = Timers()
    with (
        pytest.raises(ValueError, match="'train' is already running"),
        timers("train"),
        timers("train"),
    ):
        pass


def test_a_timer_still_running_counts_at_the_next_pop():
    timers = Timers()
    with timers("step"):
        assert timers.pop() == {}
    assert timers.pop().keys() == {"time/step_s"}


def test_seconds_of_another_thread_are_taken_over_once():
    timers = Timers()
    other = Timers()
    for measured in (timers, other):
        with measured("rollout"):
            pass
    with other("reward"):
        pass
    seconds = timers.take_over(other)
    assert seconds > 0 and not other.pop()
    assert timers.pop().keys() == {"time/rollout_s", "time/reward_s"}
