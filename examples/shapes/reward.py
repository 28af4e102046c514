"""shapes and shapes_strict: does the image show what its caption, one of examples.shapes.world, asks for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from examples.shapes.verifier import Verdict, verify
from examples.shapes.world import parse
from megadiff.process.workers import share_of_cores, worker_pool
from megadiff.rewards.base import Reward, RewardSample
from megadiff.types import Prompt

MOST_WORKERS = 16
LEAST_CORES = 4  # with fewer, processes only take turns with the trainer and the replica
KEPT = 4096  # samples, for the second reward that asks for the same ones

_Claim = tuple[RewardSample, Future[list[Verdict]]]


class ShapesReward(Reward):
    """In [0, 1], mean over frames: 1 for exactly what the caption asks for, else at most 0.5, with credit for each
    object that is right in shape or colour. See examples.shapes.verifier."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        return [
            sum(map(self._value, verdicts)) / len(verdicts) for verdicts in VERDICTS.of(samples)
        ]

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            parse(prompt.text)

    def close(self) -> None:
        VERDICTS.close()

    def _value(self, verdict: Verdict) -> float:
        return verdict.dense


class ShapesStrictReward(ShapesReward):
    """1 for exactly what the caption asks for and nothing else, else 0; mean over frames. Its mean is the accuracy."""

    def _value(self, verdict: Verdict) -> float:
        return float(verdict.strict)


class Verdicts:
    """Verdicts on samples, worked out once however many rewards ask for them, in processes where there are cores for it:
    OpenCV's calls here are too short to release the GIL for long, so threads verify no faster than one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # by identity: both rewards get the same objects, which are kept here, so that no other can have their id. A digest
        # of the pixels would give up the GIL and wait for it again, once a sample
        self._known: OrderedDict[int, _Claim] = OrderedDict()
        self._pool: Executor | None = None

    def of(self, samples: Sequence[RewardSample]) -> list[list[Verdict]]:
        """For each sample one verdict a frame."""
        futures, new = self._claim(samples)
        try:
            self._work_out(new)
        except BaseException as error:  # whoever waits for these must hear of it; they are not kept
            with self._lock:
                for sample, future in new:
                    self._known.pop(id(sample), None)
                    future.set_exception(error)
            raise
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._known.clear()
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)

    def _claim(
        self, samples: Sequence[RewardSample]
    ) -> tuple[list[Future[list[Verdict]]], list[_Claim]]:
        """The futures of all samples, and those of them that nobody has begun: they are this caller's."""
        with self._lock:
            new = [(sample, Future()) for sample in samples if id(sample) not in self._known]
            self._known |= {id(claim[0]): claim for claim in new}
            futures = [self._known[id(sample)][1] for sample in samples]
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return futures, new

    def _work_out(self, new: Sequence[_Claim]) -> None:
        if not new:
            return
        pixels = [sample.pixels for sample, _ in new]
        texts = [sample.prompt.text for sample, _ in new]
        pool = self._workers()
        found = (
            pool.submit(verify_frames, pixels, texts).result()
            if pool
            else verify_frames(pixels, texts)
        )
        for (_, future), verdicts in zip(new, found, strict=True):
            future.set_result(verdicts)

    def _workers(self) -> Executor | None:
        cores = share_of_cores(MOST_WORKERS)
        with self._lock:
            if self._pool is None and cores >= LEAST_CORES:
                self._pool = worker_pool(cores)
            return self._pool


def verify_frames(pixels: Sequence[np.ndarray], texts: Sequence[str]) -> list[list[Verdict]]:
    """pixels: of each sample [F, H, W, 3] uint8. texts: their captions."""
    return [
        [verify(frame, parse(text)) for frame in frames]
        for frames, text in zip(pixels, texts, strict=True)
    ]


VERDICTS = Verdicts()
