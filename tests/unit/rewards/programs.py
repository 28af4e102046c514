"""Programs that end while a reward's call runs. Run as: python programs.py REWARD HOW."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch

from megadiff.config.rewards import RewardConfig
from megadiff.rewards import workers
from megadiff.rewards.base import Reward, RewardSample
from megadiff.rewards.score import Scorer
from megadiff.types import Prompt, RolloutGroup, Sampling

RUNNING = threading.Event()


class Torch(Reward):
    """Is within torch almost all the time, and never ends."""

    samples_per_call = 1

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        matrix = torch.randn(300, 300)
        RUNNING.set()
        while True:
            matrix @ matrix


class Onnx(Reward):
    """Is within onnxruntime almost all the time, and never ends."""

    samples_per_call = 1

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        from rapidocr_onnxruntime import RapidOCR

        engine = RapidOCR(intra_op_num_threads=1)
        image = np.full((256, 256, 3), 200, np.uint8)
        RUNNING.set()
        while True:
            engine(image)


class Sleeps(Reward):
    """Never runs Python again, so that it cannot be interrupted."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        RUNNING.set()
        threading.Event().wait()
        return []


class KeepsTheGil(Reward):
    """A regular expression that tries 2^40 ways, as no thread of Python can end."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        RUNNING.set()
        re.match(r"(a+)+$", "a" * 40 + "b")
        return []


class Slow(Reward):
    """Gives the GIL back, for longer than the watch allows to keep it."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        RUNNING.set()
        threading.Event().wait(3.0)
        return [0.0] * len(samples)


def main() -> None:
    reward, how = sys.argv[1:]
    if reward in ("Torch", "Onnx") and how != "close":
        # These calls never end by themselves. Once interrupted they end between two kernels, which
        # may take long on a busy machine.
        join = workers._join
        waits_s = iter((0.5, 30.0))
        workers._join = lambda threads, _: join(threads, next(waits_s))
    sys.modules["programs"] = sys.modules["__main__"]
    timeout_s = 1.0 if reward == "KeepsTheGil" else 60.0
    configs = {"judge": RewardConfig(type=f"programs:{reward}", timeout_s=timeout_s)}
    scorer = Scorer(configs, num_workers=4)
    scorer.submit(group())
    if how == "collect":
        scorer.collect()
    RUNNING.wait()
    if how == "close":
        scorer.close()
    if how == "raise":
        raise RuntimeError("the program fails")
    if how == "exit":
        sys.exit(3)


def group() -> RolloutGroup:
    return RolloutGroup(
        prompt=Prompt(text="a red fox", id="0"),
        sampling=Sampling(height=16, width=16, num_inference_steps=2),
        sample_indices=(0, 1, 2, 3),
        window_start=0,
        latents_GSLC=torch.zeros(4, 1, 1, 1),
        log_probs_GW=torch.zeros(4, 0),
        pixels_GFHWC=torch.zeros(4, 1, 4, 4, 3, dtype=torch.uint8),
        schedule=torch.zeros(2),
        conditioning={},
        policy_version=0,
        replica="r",
    )


if __name__ == "__main__":
    from megadiff.rewards import gil_watch, score

    gil_watch.BEAT_S = 0.3
    score.GRACE_S = 1.0 if sys.argv[1] != "Slow" else -59.0
    main()
