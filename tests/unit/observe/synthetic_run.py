"""Run folders for tests, written through the real trackers and samples code: what a run of that shape would leave."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

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
"""
PROMPTS = (
    "a red square on a white table",
    "a blue circle left of a green triangle",
    'a sign that says "OPEN" <b>&</b>',
    "一只熊猫在雪地里 🐼 / ..\\..",
)


def metrics_of(step: int, *, num_steps: int) -> dict[str, float]:
    """Every metric of the architecture page, as a run that learns would log it; the same at every call."""
    noise = torch.rand(8, generator=torch.Generator().manual_seed(step)).tolist()
    reward = 0.38 + 0.3 * (1 - math.exp(-2.5 * step / num_steps)) + 0.03 * (noise[0] - 0.5)
    metrics = {
        "reward/mean": reward,
        "reward/std": 0.12 - 0.04 * step / num_steps,
        "reward/color": reward + 0.05 * noise[1],
        "reward/jpeg_size": 0.5 + 0.1 * noise[2],
        "reward/zero_std_ratio": 0.125 * int(3 * noise[3]),
        "policy/clip_fraction": 0.05 + 0.1 * noise[4],
        "policy/kl_old": 1e-7 * 10 ** (4 * noise[5]),
        "policy/kl_ref": 2e-4 * step,
        "loss/policy": 1e-4 * (noise[6] - 0.5),
        "optim/grad_norm": 0.4 + 0.2 * noise[7],
        "parity/log_prob_gap_max": 4e-7 + 2e-7 * noise[0],
        "rollout/staleness": 0.0,
        "perf/samples_per_s": 30 + 4 * noise[1],
        "memory/peak_gib": 1.2,
        "time/rollout_s": 1.1 + 0.3 * noise[2],
        "time/reward_s": 0.1,
        "time/train_s": 0.9 + 0.1 * noise[3],
        "time/sync_s": 0.22,
        "time/forward_s": 0.3,
        "time/step_s": 2.75 + 0.4 * noise[4],
    }
    if step % 10 == 0:
        metrics |= {"eval/color": reward + 0.02, "eval/shapes_strict": 0.2 + 0.5 * step / num_steps}
    return metrics


def picture(hue: float, *, sharpness: float, size: int = 64) -> Tensor:
    """uint8 [1, size, size, 3]: a coloured disc that grows out of noise as sharpness goes 0 → 1."""
    axis = torch.linspace(-1, 1, size)
    disc = (axis[:, None] ** 2 + axis[None, :] ** 2 < 0.45).float()[..., None]
    colour = 0.5 + 0.5 * torch.cos(6.283 * (hue + torch.tensor([0.0, 0.33, 0.67])))
    clean = disc * colour + (1 - disc) * 0.93
    noise = torch.rand(size, size, 3, generator=torch.Generator().manual_seed(7))
    return ((sharpness * clean + (1 - sharpness) * noise) * 255).byte()[None]


def samples_of(step: int, *, num_steps: int, size: int = 64) -> list[SampleRecord]:
    """Two samples of each of PROMPTS."""
    sharpness = step / num_steps
    return [
        SampleRecord(
            pixels=picture(number / len(PROMPTS), sharpness=sharpness, size=size),
            caption=prompt,
            rewards={"color": 0.3 + 0.6 * sharpness, "jpeg_size": 0.5},
            reward=0.3 + 0.5 * sharpness - 0.1 * index,
            prompt_id=f"{number:016x}",
            sample_index=index,
            policy_version=step - 1,
        )
        for number, prompt in enumerate(PROMPTS)
        for index in range(2)
    ]


def write_run(folder: Path, *, steps: int, num_steps: int = 60, sample_every: int = 10, size: int = 64) -> Path:
    """A run that finished `steps` of `num_steps` steps."""
    with build_trackers(["jsonl"], folder, {}) as trackers:
        (folder / "config.yaml").write_text(CONFIG.format(num_steps=num_steps), "utf-8")
        for step in range(1, steps + 1):
            trackers.log(step, metrics_of(step, num_steps=num_steps))
            if sample_every and (step == 1 or step % sample_every == 0):
                trackers.images(step, samples_of(step, num_steps=num_steps, size=size))
    return folder
