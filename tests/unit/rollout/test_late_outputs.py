"""The race of vllm-omni 0.26, replayed by hand."""

import threading
from concurrent.futures import Future

import pytest

from megadiff.rollout.server.late_outputs import deliver_late_outputs


class Executor:
    """The tables and the waiting of MultiprocDiffusionExecutor 0.26; keep() is the end of its
    reader thread's work.
    """

    def __init__(self):
        self._futures_lock = threading.RLock()
        self._output_futures, self._completed_outputs = {}, {}

    def wait_output_ready(self, output_id):
        with self._futures_lock:
            if output_id in self._completed_outputs:
                return self._completed_outputs.pop(output_id)
            self._output_futures[output_id] = Future()
            return self._output_futures[output_id]

    def keep(self, output_id, completed):
        with self._futures_lock:
            self._completed_outputs[output_id] = completed


def _done(value):
    future = Future()
    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
    return future


@pytest.fixture
def executor():
    class Mended(Executor):
        pass

    deliver_late_outputs(Mended)
    return Mended()


def test_an_output_kept_after_somebody_began_to_wait_is_delivered(executor):
    waiting = executor.wait_output_ready("a")
    executor.keep("a", _done("pixels"))
    assert waiting.result(timeout=0) == "pixels"
    assert not executor._completed_outputs and not executor._output_futures


def test_a_failure_is_delivered_too(executor):
    waiting = executor.wait_output_ready("a")
    executor.keep("a", _done(RuntimeError("no shared memory")))
    with pytest.raises(RuntimeError, match="no shared memory"):
        waiting.result(timeout=0)


def test_an_output_that_nobody_waits_for_is_kept(executor):
    executor.keep("a", _done(1))
    assert executor.wait_output_ready("a").result(timeout=0) == 1
    executor.keep("b", _done(2))
    assert executor.wait_output_ready("b").result(timeout=0) == 2


def test_without_the_mending_it_is_lost():
    executor = Executor()
    waiting = executor.wait_output_ready("a")
    executor.keep("a", _done("pixels"))
    assert not waiting.done()
