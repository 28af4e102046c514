"""Score whether an image shows what its caption, one of examples.shapes.world, asks for."""

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
MAX_CLAIMS = 4096  # samples, for the second reward that asks for the same ones

_Claim = tuple[RewardSample, Future[list[Verdict]]]


class ShapesReward(Reward):
    """Score 1 for exactly what the caption asks for, else at most 0.5; mean over frames.

    With credit for each object that is right in shape or colour, see examples.shapes.verifier.
    """

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        verdicts_of_samples = VERDICTS.of(samples)
        return [sum(map(self._value, frames)) / len(frames) for frames in verdicts_of_samples]

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            parse(prompt.text)

    def close(self) -> None:
        VERDICTS.close()

    def _value(self, verdict: Verdict) -> float:
        return verdict.dense


class ShapesStrictReward(ShapesReward):
    """Score 1 for exactly what the caption asks for and nothing else, else 0; mean over frames."""

    def _value(self, verdict: Verdict) -> float:
        return float(verdict.strict)


class Verdicts:
    """Judge samples once, however many rewards ask for them, in processes where there are cores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By identity: both rewards get the same objects. They are stored here, so that no other can
        # have their id. A digest of the pixels would give up the GIL once a sample and wait for it.
        self._claims: OrderedDict[int, _Claim] = OrderedDict()
        # OpenCV's calls are too short to release the GIL for long: threads would be no faster.
        self._pool: Executor | None = None

    def of(self, samples: Sequence[RewardSample]) -> list[list[Verdict]]:
        """Return one verdict a frame for each sample."""
        futures, new = self._claim(samples)
        try:
            self._work_out(new)
        except (
            BaseException
        ) as error:  # who waits for these must hear of it; they can be tried again
            with self._lock:
                for sample, future in new:
                    self._claims.pop(id(sample), None)
                    future.set_exception(error)
            raise
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        with self._lock:
            pool = self._pool
            self._pool = None
            self._claims.clear()
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)

    def _claim(
        self, samples: Sequence[RewardSample]
    ) -> tuple[list[Future[list[Verdict]]], list[_Claim]]:
        """Return the futures of all samples, and the claims that this caller must work out."""
        with self._lock:
            new = [(sample, Future()) for sample in samples if id(sample) not in self._claims]
            self._claims |= {id(claim[0]): claim for claim in new}
            futures = [self._claims[id(sample)][1] for sample in samples]
            while len(self._claims) > MAX_CLAIMS:
                self._claims.popitem(last=False)
            return futures, new

    def _work_out(self, new: Sequence[_Claim]) -> None:
        if not new:
            return
        pixels = [sample.pixels for sample, _ in new]
        texts = [sample.prompt.text for sample, _ in new]
        pool = self._workers()
        if pool:
            verdicts_of_samples = pool.submit(verify_frames, pixels, texts).result()
        else:
            verdicts_of_samples = verify_frames(pixels, texts)
        for (_, future), verdicts in zip(new, verdicts_of_samples, strict=True):
            future.set_result(verdicts)

    def _workers(self) -> Executor | None:
        cores = share_of_cores(MOST_WORKERS)
        with self._lock:
            if self._pool is None and cores >= LEAST_CORES:
                self._pool = worker_pool(cores)
            return self._pool


def verify_frames(pixels: Sequence[np.ndarray], texts: Sequence[str]) -> list[list[Verdict]]:
    """Judge samples in a worker process. pixels: of each [F, H, W, 3] uint8. texts: captions."""
    verdicts = []
    for frames, text in zip(pixels, texts, strict=True):
        caption = parse(text)
        verdicts.append([verify(frame, caption) for frame in frames])
    return verdicts


VERDICTS = Verdicts()
