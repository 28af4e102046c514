"""Mend a race of vllm-omni 0.26's engine, which loses about one large output in a thousand.

The engine's reader thread looks whether a request waits for an output and sees none. It unpacks the
output (milliseconds for many images) and only then stores it under its id. A request that begins to
wait meanwhile finds nothing stored, waits for a message that has come already, and fails after
30 s. 0.28 looks and stores under one lock.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class CompletedOutputs(dict[str, Future]):
    """Store outputs that nobody waited for when they came; hand over those awaited by now.

    waiting: id → future, the engine's own table. Both are only touched under the engine's lock.
    """

    def __init__(self, waiting: dict[str, Future], completed: dict[str, Future]) -> None:
        super().__init__(completed)
        self._waiting = waiting

    def __setitem__(self, output_id: str, completed: Future) -> None:
        waiting = self._waiting.pop(output_id, None)
        if waiting is None or waiting.done():
            super().__setitem__(output_id, completed)
        elif error := completed.exception():
            waiting.set_exception(error)
        else:
            waiting.set_result(completed.result())


def deliver_late_outputs(executor: Any) -> None:
    """Make an executor class lose none of its outputs.

    executor: vllm_omni's MultiprocDiffusionExecutor, 0.26; untyped, as a method is replaced.
    """
    stock = executor.wait_output_ready

    def wait_output_ready(self: Any, async_output_id: str) -> Future:
        with self._futures_lock:
            # once for each executor, whose tables its constructor has made
            if not isinstance(self._completed_outputs, CompletedOutputs):
                self._completed_outputs = CompletedOutputs(
                    self._output_futures, self._completed_outputs
                )
        return stock(self, async_output_id)

    executor.wait_output_ready = wait_output_ready
