"""A race of vllm-omni 0.26's engine, mended: without this about one large output in a thousand is never delivered.

The engine's reader thread looks for whoever waits for an output, finds nobody, unpacks the output (milliseconds for many
images) and only then keeps it under its id. A request that begins to wait meanwhile finds nothing kept, waits for a
message that has come already, and fails after 30 s. 0.28 keeps and looks in one piece.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class CompletedOutputs(dict[str, Future]):
    """Outputs that nobody waited for when they came; one that somebody waits for by now is handed over instead.

    waiting: id → future, the engine's own table. Both are only touched under the engine's lock.
    """

    def __init__(self, waiting: dict[str, Future], completed: dict[str, Future]) -> None:
        super().__init__(completed)
        self._waiting = waiting

    def __setitem__(self, output_id: str, completed: Future) -> None:
        waiting = self._waiting.pop(output_id, None)
        if waiting is None or waiting.done():
            super().__setitem__(output_id, completed)
        elif completed.exception() is not None:
            waiting.set_exception(completed.exception())
        else:
            waiting.set_result(completed.result())


def deliver_late_outputs(executor: type) -> None:
    """Make the executor class (vllm_omni's MultiprocDiffusionExecutor, 0.26) lose none of its outputs."""
    stock = executor.wait_output_ready

    def wait_output_ready(self: Any, async_output_id: str) -> Future:
        with self._futures_lock:
            if not isinstance(self._completed_outputs, CompletedOutputs):
                self._completed_outputs = CompletedOutputs(
                    self._output_futures, self._completed_outputs
                )
        return stock(self, async_output_id)

    executor.wait_output_ready = wait_output_ready
