"""Supervised runs of every family, as a user starts them: they train, or are refused first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.cli.train import main
from tests.e2e.conftest import Trainer, train_in_ranks

TinyFolder = Callable[[str], Path]
CAPTIONS = ["a red wall", "a wall", "eine grüne Wand", "a red wall"]
SETTINGS = [
    "train.updates_per_step=1",
    "train.prompts_per_step=4",
    "train.microbatch_size=4",
    "optim.lr=1e-3",
    "checkpoint.every=0",
    "rollout.num_inference_steps=3",
]
SFT = [*SETTINGS, "algorithm.name=sft", "algorithm.group_size=2", "train.num_steps=12"]
DPO = [
    *SETTINGS,
    "algorithm.name=offline_dpo",
    "algorithm.group_size=1",
    "algorithm.noise_levels=2",
    "train.num_steps=3",
]
# what an evaluation of the run would sample; training has none of it
VIDEO = ["rollout.num_frames=5", "rollout.guidance_scale=3"]
LEARNING = {
    "sd35_medium": ["rollout.guidance_scale=4.5"],
    "z_image": ["rollout.guidance_scale=5"],
    "wan21_t2v_1_3b": VIDEO,
    "wan22_ti2v_5b": VIDEO,
    "wan22_t2v_a14b": [*VIDEO, "rollout.guidance_scale_2=2"],
}
REFUSED = {
    "qwen_image_edit_2509": "with Qwen-Image-Edit: an edit begins with given images",
    "qwen_image_edit_2511": "with Qwen-Image-Edit: an edit begins with given images",
    "wan22_i2v_a14b": "with Wan2.2 I2V: its given first frame would be all of a video of one frame",
    "bagel": "with BAGEL 7B-MoT: its autoencoder is not in diffusers' layout",
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of captioned images, and under pairs/ of preferred ones."""
    rows = []
    pairs = []
    (tmp_path / "pairs").mkdir()
    for number, text in enumerate(CAPTIONS):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        other = Image.fromarray(255 - pixels)
        for folder in (tmp_path, tmp_path / "pairs"):
            Image.fromarray(pixels).save(folder / f"{number}.png")
        other.save(tmp_path / "pairs" / f"{number}_other.png")
        rows.append({"file_name": f"{number}.png", "text": text})
        pair = {"chosen": f"{number}.png", "rejected": f"{number}_other.png"}
        pairs.append({"caption": text, **pair})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pairs" / "metadata.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


@pytest.mark.parametrize("name", LEARNING)
def test_it_learns_from_captioned_images(name: str, images: Path, tiny_folder: TinyFolder) -> None:
    trainer = Trainer(images, tiny_folder(name))
    result = trainer.run(*SFT, f"data.images={images}", *LEARNING[name])
    assert result.code == 0, result.stderr
    losses = [row["loss/flow_matching"] for row in result.rows]
    assert len(losses) == 12
    assert np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3]), losses


def test_pooled_texts_are_the_same_in_every_layout(images: Path, tiny_folder: TinyFolder) -> None:
    """SD3.5 has a pooled vector and no mask."""
    trainer = Trainer(images, tiny_folder("sd35_medium"))
    settings = [*SFT, f"data.images={images}", "train.num_steps=3"]
    expected = trainer.run(*settings, name="one").rows
    for layout in (["parallel.dp=2"], ["engine.backend=megatron", "parallel.tp=2"]):
        rows = train_in_ranks(trainer, layout[-1], 2, *settings, *layout).rows
        for key in ("loss/flow_matching", "optim/grad_norm"):
            found = [row[key] for row in rows]
            assert found == pytest.approx([row[key] for row in expected], rel=1e-4), layout


def test_pairs_move_a_model_with_pooled_texts(images: Path, tiny_folder: TinyFolder) -> None:
    trainer = Trainer(images, tiny_folder("sd35_medium"))
    result = trainer.run(*DPO, f"data.pairs={images / 'pairs'}")
    assert result.code == 0, result.stderr
    rows = result.rows
    assert rows[0]["loss/policy"] == pytest.approx(math.log(2))
    assert rows[-1]["policy/margin"] > rows[0]["policy/margin"] == 0


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_starts(
    name: str, images: Path, tiny_folder: TinyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(images, tiny_folder(name))
    for settings in (
        [*SFT, f"data.images={images}"],
        [*DPO, f"data.pairs={images / 'pairs'}"],
    ):
        assert main([*trainer.command(*settings)[3:], "--dry-run"]) == 2
        message = capsys.readouterr().err
        assert REFUSED[name] in message
        assert "train it by RL, e.g. with algorithm.name=flow_grpo" in message
    assert not (images / "run").exists()
    assert not (images / "cache").exists()
