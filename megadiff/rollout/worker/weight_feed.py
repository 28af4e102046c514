"""One call of a pipeline's own `load_weights` for all buckets of a push.

vllm-omni's loaders walk the whole model before the first tensor: 10 to 30 ms, whatever they are given. So one call is
kept open, in a thread of its own, and takes bucket after bucket. What it does with a tensor stays vllm-omni's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch
from torch import Tensor

Pairs = Iterator[tuple[str, Tensor]]


class WeightFeed:
    """load: a pipeline's load_weights, which must take one tensor after another and be done with each before the next; then
    a bucket's memory is free again when give() returns. device: of the weights."""

    def __init__(self, load: Callable[[Pairs], object], device: torch.device) -> None:
        self._load, self._device = load, device
        self._given: SimpleQueue[Pairs | None] = SimpleQueue()
        self._ended = False  # whether the loader took all, of all buckets
        self._answers: SimpleQueue[BaseException | None] = (
            SimpleQueue()
        )  # None: took all that was given
        self._thread: threading.Thread | None = None

    def give(self, pairs: Pairs) -> None:
        """Returns when all of them are loaded. Raises what the loader or the iterator raises; the next call starts anew."""
        if self._thread is None:
            self._given, self._ended = (
                SimpleQueue(),
                False,
            )  # without what a loader that failed left there
            self._thread = threading.Thread(target=self._run, name="weight-feed", daemon=True)
            self._thread.start()
        self._given.put(pairs)
        self._outcome()

    def close(self) -> None:
        """Lets the loader come to its end, where it may check or convert what came. Nothing when none is open."""
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
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            with torch.no_grad():
                self._load(self._pairs())
            error = (
                None
                if self._ended
                else RuntimeError("the loader stopped before it had taken all tensors")
            )
        except BaseException as failure:
            error = failure
        self._answers.put(error)

    def _pairs(self) -> Pairs:
        while (pairs := self._given.get()) is not None:
            yield from pairs
            self._answers.put(None)
        self._ended = True
