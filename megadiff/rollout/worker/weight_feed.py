"""Load all buckets of a push in one call of a pipeline's own `load_weights`.

vllm-omni's loaders walk the whole model before the first tensor: 10 to 30 ms, whatever they are
given. So one call is kept open, in a thread of its own, and takes bucket after bucket. What it does
with a tensor stays vllm-omni's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch
from torch import Tensor

Pairs = Iterator[tuple[str, Tensor]]


class WeightFeed:
    """Hand buckets to one open call of a loader.

    load: a pipeline's load_weights, which must take one tensor after another and be done with each
    before the next. Then a bucket's memory is free again when give() returns.
    device: of the weights.
    """

    def __init__(self, load: Callable[[Pairs], object], device: torch.device) -> None:
        self._load = load
        self._device = device
        self._given: SimpleQueue[Pairs | None] = SimpleQueue()  # None: the end
        # what became of a bucket; None: the loader took all of it
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, pairs: Pairs) -> None:
        """Return when all of them are loaded.

        Raises what the loader or the iterator raises; the next call starts anew.
        """
        if self._thread is None:
            self._given = SimpleQueue()  # a loader that failed may have left some in the old one
            self._thread = threading.Thread(target=self._run, name="weight-feed", daemon=True)
            self._thread.start()
        self._given.put(pairs)
        self._outcome()

    def close(self) -> None:
        """Let an open loader come to its end, where it may check or convert what came."""
        if self._thread is None:
            return
        self._given.put(None)
        self._outcome()
        self._thread = None

    def _outcome(self) -> None:
        error = self._answers.get()
        if error is not None:
            self._thread = None
            raise error

    def _run(self) -> None:
        answer: BaseException | None = RuntimeError(
            "the loader stopped before it had taken all tensors"
        )

        def pairs_of_buckets() -> Pairs:
            nonlocal answer
            while (pairs := self._given.get()) is not None:
                yield from pairs
                self._answers.put(None)
            answer = None

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # torch keeps it for each thread
            with torch.no_grad():
                self._load(pairs_of_buckets())
        except BaseException as failure:  # give() raises it in the caller's thread
            answer = failure
        self._answers.put(answer)
