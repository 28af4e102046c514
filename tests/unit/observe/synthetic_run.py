"""Run folders for tests, written through the real trackers and samples code: what a run of that
shape would leave.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from megadiff.observe.evaluation import (
    EvaluatedSample,
    Evaluation,
    evaluation_folder,
    image_name,
    write_evaluation,
)
from megadiff.observe.samples import SampleRecord
from megadiff.observe.trackers import build_trackers

CONFIG = """seed: 0
run:
  dir: runs
  name: synthetic
train:
  num_steps: {num_steps}
  prompts_per_step: 8
algorithm:
  name: flow_grpo
  group_size: 8
  clip_range: 0.0001
reward:
  color: {{type: color, weight: 1.0}}
  jpeg_size: {{type: jpeg_size, weight: 0.0}}
"""
TASKS = ("single", "colours", "counting", "position")
PROMPTS = (
    "a red square on a white table",
    "a blue circle left of a green triangle",
    'a sign that says "OPEN" <b>&</b>',
    "一只熊猫在雪地里 🐼 / ..\\..",
)


def metrics_of(step: int, *, num_steps: int) -> dict[str, float]:
    """Every metric of the architecture page, as a run that learns would log it; the same at every
    call.
    """
    noise = torch.rand(8, generator=torch.Generator().manual_seed(step)).tolist()
    reward = 0.38 + 0.3 * (1 - math.exp(-2.5 * step / num_steps)) + 0.03 * (noise[0] - 0.5)
    metrics = {
        "reward/mean": reward,
        "reward/std": 0.12 - 0.04 * step / num_steps,
        "reward/color": reward + 0.05 * noise[1],
        "reward/jpeg_size": 0.5 + 0.1 * noise[2],
        "reward/color/group_std": 0.1,
        "reward/color/share_of_advantage": 0.93,
        "reward/jpeg_size/group_std": 0.004,
        "reward/jpeg_size/mass": 0.75,
        "time/reward_color_s": 0.25,
        "reward/zero_std_ratio": 0.125 * int(3 * noise[3]),
        "diversity/pixel_spread": 0.26 - 0.04 * step / num_steps + 0.02 * noise[2],
        "diversity/colour_entropy_bit": 1.2 - 0.2 * step / num_steps + 0.3 * noise[3],
        "diversity/saturation": 0.3 + 0.05 * noise[4],
        "diversity/clipped_share": 0.02 + 0.01 * noise[5],
        "diversity/brightness": 0.5 + 0.02 * noise[6],
        "diversity/edges": 0.06 + 0.01 * noise[7],
        "diversity/blank_share": 0.4 + 0.05 * noise[0],
        "policy/clip_fraction": 0.05 + 0.1 * noise[4],
        "policy/kl_old": 1e-7 * 10 ** (4 * noise[5]),
        "policy/kl_ref": 2e-4 * step,
        "loss/policy": 1e-4 * (noise[6] - 0.5),
        "optim/grad_norm": 0.4 + 0.2 * noise[7],
        "parity/log_prob_gap_max": 4e-7 + 2e-7 * noise[0],
        "perf/samples_per_s": 30 + 4 * noise[1],
        "memory/peak_gib": 1.2,
        "time/rollout_s": 1.1 + 0.3 * noise[2],
        "time/reward_s": 0.1,
        "time/train_s": 0.9 + 0.1 * noise[3],
        "time/sync_s": 0.22,
        "time/forward_s": 0.3,
        "time/step_s": 2.75 + 0.4 * noise[4],
    }
    return metrics | (eval_metrics_of(step, num_steps=num_steps) if step % 10 == 0 else {})


def eval_metrics_of(step: int, *, num_steps: int) -> dict[str, float]:
    """What a step with an evaluation, also step 0, logs of it."""
    evaluation, _ = evaluation_of(step, num_steps=num_steps, size=4)
    means = {f"eval/{name}": evaluation.estimate(name).mean for name in evaluation.reward_names}
    return means | {f"eval/{name}": value for name, value in evaluation.diversity.items()}


def evaluation_of(
    step: int, *, num_steps: int, size: int = 64
) -> tuple[Evaluation, dict[str, Tensor]]:
    """25 samples of each of PROMPTS, the same at every step; more of them are right as the run goes
    on. With the images
    of the first six.
    """
    samples, images = [], {}
    for number, (prompt, task) in enumerate(zip(PROMPTS, TASKS)):
        for index in range(25):
            is_right = index < (0.3 + 0.1 * number + 0.3 * step / num_steps) * 25
            file = image_name(f"{number:016x}", index) if index % 4 == 0 and index < 24 else None
            if file:
                sharpness = (0.9 if is_right else 0.45) * (0.6 + 0.4 * step / num_steps)
                images[file] = picture(
                    (number + index / 16) / len(PROMPTS), sharpness=sharpness, size=size
                )
            samples.append(
                EvaluatedSample(
                    prompt_id=f"{number:016x}",
                    sample_index=index,
                    caption=prompt,
                    task=task,
                    file=file,
                    rewards={"color": 0.4 + 0.4 * is_right, "shapes_strict": float(is_right)},
                )
            )
    evaluation = Evaluation(
        model="runs/synthetic",
        step=step,
        seed=0,
        num_inference_steps=10,
        true_cfg_scale=1.0,
        height=size,
        width=size,
        samples=samples,
        diversity={"colour_entropy_bit": 1.1, "latent_spread": 0.9, "saturation": 0.35},
    )
    return evaluation, images


def picture(hue: float, *, sharpness: float, size: int = 64) -> Tensor:
    """uint8 [1, size, size, 3]: a coloured disc that grows out of noise as sharpness goes 0 → 1."""
    axis = torch.linspace(-1, 1, size)
    disc = (axis[:, None] ** 2 + axis[None, :] ** 2 < 0.45).float()[..., None]
    colour = 0.5 + 0.5 * torch.cos(6.283 * (hue + torch.tensor([0.0, 0.33, 0.67])))
    clean = disc * colour + (1 - disc) * 0.93
    noise = torch.rand(size, size, 3, generator=torch.Generator().manual_seed(7))
    return ((sharpness * clean + (1 - sharpness) * noise) * 255).byte()[None]


def moving_picture(hue: float, *, sharpness: float, num_frames: int, size: int = 64) -> Tensor:
    """uint8 [num_frames, size, size, 3]: the disc on its way to the right, two pixels a frame."""
    still = picture(hue, sharpness=sharpness, size=size)[0]
    return torch.stack([still.roll(2 * frame, dims=1) for frame in range(num_frames)])


def samples_of(
    step: int, *, num_steps: int, size: int = 64, num_frames: int = 1
) -> list[SampleRecord]:
    """Two samples of each of PROMPTS."""
    sharpness = step / num_steps
    return [
        SampleRecord(
            pixels=moving_picture(
                number / len(PROMPTS), sharpness=sharpness, num_frames=num_frames, size=size
            ),
            caption=prompt,
            # the last prompt's second sample has no colour
            rewards={
                "color": None if number + index == 4 else 0.3 + 0.6 * sharpness - 0.1 * index,
                "jpeg_size": 0.5,
            },
            reward=0.3 + 0.5 * sharpness - 0.1 * index,
            prompt_id=f"{number:016x}",
            sample_index=index,
            policy_version=step - 1,
        )
        for number, prompt in enumerate(PROMPTS)
        for index in range(2)
    ]


def write_run(
    folder: Path,
    *,
    steps: int,
    num_steps: int = 60,
    sample_every: int = 10,
    size: int = 64,
    evaluated: bool = False,
    num_frames: int = 1,
) -> Path:
    """A run that finished `steps` of `num_steps` steps.

    evaluated: with an evaluation before the first step and each
    10th, in its metrics and its folder. num_frames: of its samples; more than one are videos.
    """

    def evaluate(step: int) -> None:
        evaluation, images = evaluation_of(step, num_steps=num_steps, size=size)
        write_evaluation(evaluation_folder(folder, step), evaluation, images)

    with build_trackers(["jsonl"], folder, {}) as trackers:
        (folder / "config.yaml").write_text(CONFIG.format(num_steps=num_steps), "utf-8")
        if evaluated:
            evaluate(0)
            trackers.log(0, eval_metrics_of(0, num_steps=num_steps))
        for step in range(1, steps + 1):
            if evaluated and step % 10 == 0:
                evaluate(step)
            trackers.log(step, metrics_of(step, num_steps=num_steps))
            if sample_every and (step == 1 or step % sample_every == 0):
                trackers.images(
                    step, samples_of(step, num_steps=num_steps, size=size, num_frames=num_frames)
                )
    return folder


def section_of(page: str, title: str) -> str:
    """The HTML of one section of a report."""
    return page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
