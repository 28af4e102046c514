"""Evaluations for tests: seven tasks whose accuracy is given, the same prompts and noise at every
call.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from synthetic_run import picture

from megadiff.observe.evaluation import EvaluatedSample, Evaluation, image_name, write_evaluation

TASKS = ("single", "colors", "two", "counting", "position", "attributes", "position+attributes")


def evaluation(
    accuracy: float, *, per_task: int = 20, model: str = "assets/shapes", step: int = 0
) -> Evaluation:
    """`shapes_strict` is 1 in about `accuracy` of the samples (the later the task, the fewer),
    `shapes` lies in [0, 1].
    """
    samples = []
    for number, task in enumerate(TASKS):
        draws = random.Random(number)
        for index in range(per_task):
            luck = draws.random()
            strict = float(luck < accuracy * (1.4 - number / 7))
            samples.append(
                EvaluatedSample(
                    prompt_id=f"{number * 1000 + index // 2:016x}",
                    sample_index=index % 2,
                    caption=f"a red <b>circle</b> & {task} {index // 2}",
                    task=task,
                    rewards={"shapes_strict": strict, "shapes": 0.5 + 0.5 * strict * luck},
                )
            )
    return Evaluation(
        model=model,
        step=step,
        seed=0,
        num_inference_steps=10,
        true_cfg_scale=1.0,
        height=64,
        width=64,
        samples=samples,
        diversity={"colour_entropy_bit": 0.52, "latent_spread": 1.1, "saturation": None},
    )


def with_rewards(found: Evaluation, *, index: int, rewards: Mapping[str, float]) -> Evaluation:
    """The same with other rewards of one sample."""
    samples = list(found.samples)
    samples[index] = replace(samples[index], rewards=rewards)
    return replace(found, samples=samples)


def write(folder: Path, found: Evaluation, *, sharpness: float = 1.0) -> Evaluation:
    """Writes it with images of the first four samples of every task; returns it as written."""
    samples = [
        replace(sample, file=image_name(sample.prompt_id, sample.sample_index))
        if number % 20 < 4
        else sample
        for number, sample in enumerate(found.samples)
    ]
    found = replace(found, samples=samples)
    images = {s.file: picture(n / 7, sharpness=sharpness) for n, s in enumerate(samples) if s.file}
    write_evaluation(folder, found, images)
    return found
