"""Offline DPO as a user starts it: given pairs move the policy, and layouts and resumes agree."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from PIL import Image

from examples.shapes.world import make_chunk
from megadiff.cli.train import main
from tests.e2e.conftest import ROOT, Result, Trainer, train_in_ranks

NUM_PAIRS = 8
NUM_STEPS = 14
HALF = 7
SETTINGS = [
    "algorithm.name=offline_dpo",
    "algorithm.group_size=1",
    "algorithm.noise_levels=2",
    "train.updates_per_step=1",
    f"train.prompts_per_step={NUM_PAIRS}",
    "train.microbatch_size=8",
    "optim.lr=1e-5",
    "checkpoint.every=0",
]
SAME = ("loss/policy", "policy/margin", "policy/accuracy", "optim/grad_norm")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One folder for all runs: the latents are made once."""
    trainer = Trainer(tmp_path_factory.mktemp("dpo"), ROOT / "assets/shapes")
    write_pairs(trainer.folder / "pairs")
    return trainer


def write_pairs(folder: Path) -> None:
    """Prefer a caption's picture to another caption's, which has another size as well."""
    folder.mkdir()
    pictures, captions = make_chunk(11, 0, NUM_PAIRS)
    rows = []
    for number, caption in enumerate(captions):
        row = {"caption": caption, "chosen": f"{number}.png", "rejected": f"{number}_other.png"}
        Image.fromarray(pictures[number]).save(folder / row["chosen"])
        other = Image.fromarray(pictures[(number + 3) % NUM_PAIRS])
        other.resize((80, 72)).save(folder / row["rejected"])
        rows.append(json.dumps(row))
    (folder / "metadata.jsonl").write_text("\n".join(rows))


@pytest.fixture(scope="module")
def settings(trainer: Trainer) -> list[str]:
    return [*SETTINGS, f"data.pairs={trainer.folder / 'pairs'}"]


@pytest.fixture(scope="module")
def reference(trainer: Trainer, settings: list[str]) -> Result:
    """All steps on one process."""
    result = trainer.run(*settings, f"train.num_steps={NUM_STEPS}", name="reference")
    assert result.code == 0, result.stderr
    return result


def figures(result: Result) -> list[list[float]]:
    return [[row[key] for key in SAME] for row in result.rows]


def test_the_policy_learns_to_prefer_the_chosen_images(reference: Result) -> None:
    rows = reference.rows
    assert len(rows) == NUM_STEPS
    # at first the policy is the reference
    assert rows[0]["policy/margin"] == 0
    assert rows[0]["loss/policy"] == pytest.approx(math.log(2))

    margins = [row["policy/margin"] for row in rows]
    assert fmean(margins[-3:]) > 2 * fmean(margins[1:4]) > 0
    assert fmean(row["policy/accuracy"] for row in rows[-5:]) > 0.9
    assert fmean(row["loss/policy"] for row in rows[-3:]) < 0.3


def test_a_resumed_run_repeats_every_bit(
    trainer: Trainer, settings: list[str], reference: Result
) -> None:
    """The reference is still the model of step 0, not the one that was resumed from."""
    for num_steps in (HALF, NUM_STEPS):
        result = trainer.run(*settings, f"train.num_steps={num_steps}", name="resumed")
        assert result.code == 0, result.stderr
    assert figures(result) == figures(reference)


def test_ranks_share_the_pairs(trainer: Trainer, settings: list[str], reference: Result) -> None:
    result = train_in_ranks(trainer, "dp", 2, *settings, "train.num_steps=3")
    for found, expected in zip(figures(result), figures(reference)[:3], strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_under_lora_the_reference_is_the_adapter_off(trainer: Trainer, settings: list[str]) -> None:
    lora = ["lora.rank=4", "optim.lr=1e-3", "train.num_steps=4"]
    result = trainer.run(*settings, *lora, name="lora")
    assert result.code == 0, result.stderr
    margins = [row["policy/margin"] for row in result.rows]
    assert margins[0] == 0
    assert margins[-1] > 1


def test_a_dry_run_counts_pairs(
    trainer: Trainer, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = trainer.command(*settings, "train.num_steps=1", name="dry")[3:]
    assert main([*command, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_prompts"] == NUM_PAIRS
    assert plan["microbatches_per_update_and_rank"] == NUM_PAIRS * 2 * 2 // 8


def test_a_missing_image_stops_the_dry_run(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path / "pairs")
    (tmp_path / "pairs/2_other.png").unlink()
    command = trainer.command(*SETTINGS, f"data.pairs={tmp_path / 'pairs'}", name="dry")[3:]
    assert main([*command, "--dry-run"]) == 2
    assert "metadata.jsonl:3: " in capsys.readouterr().err
