"""Settings of supervised runs, and the captioned images that they learn."""

import json

import numpy as np
from PIL import Image

from tests.e2e.conftest import Trainer

CAPTIONS = [
    "a red wall",
    "eine grüne Wand",
    "一面蓝色的墙 🧱",
    "a red wall",
    "a yellow wall",
    "a wall",
]
SETTINGS = [
    "algorithm.name=sft",
    "algorithm.group_size=2",
    "train.updates_per_step=1",
    "train.num_steps=20",
    "train.prompts_per_step=2",
    "train.microbatch_size=3",
    "optim.lr=1e-3",
    "optim.warmup_steps=8",
    "checkpoint.every=10",
    "rollout.num_inference_steps=3",
]


def trainer_of_images(folder, model):
    """One folder for all runs: the latents are made once.

    Its images/ has six images and five captions.
    """
    trainer = Trainer(folder, model)
    write_images(trainer.folder / "images")
    (trainer.folder / "held_out.txt").write_text("a green wall\na black wall\n")
    return trainer


def write_images(folder):
    folder.mkdir()
    for number in range(len(CAPTIONS)):
        pixels = np.random.default_rng(number).integers(0, 256, (80, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    write_rows(
        folder,
        [{"file_name": f"{number}.png", "text": text} for number, text in enumerate(CAPTIONS)],
    )


def write_rows(folder, rows):
    (folder / "metadata.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8"
    )
