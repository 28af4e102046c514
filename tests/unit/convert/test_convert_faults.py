"""What is wrong with a source or a command is named, with file and tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from examples.tiny_models.qwen_image import write_tiny_pipeline
from tests.unit.convert.conversions import (
    NAME,
    WEIGHTS,
    policy_state,
    refused,
    rewrite,
    run,
    seal,
    write_checkpoint,
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(NAME), f"{NAME} is missing"),
        (
            lambda tensors: tensors.update(extra=torch.ones(2)),
            "model.safetensors: extra is not in the model",
        ),
        (
            lambda tensors: tensors.update({NAME: torch.ones(128, 127)}),
            f"model.safetensors: {NAME} has shape (128, 127), the model's is (128, 128)",
        ),
        (
            lambda tensors: tensors.update({NAME: torch.ones(128, 128, dtype=torch.int32)}),
            f"model.safetensors: {NAME} is int32, weights must be float32 or bfloat16 or float16",
        ),
    ],
)
def test_a_model_with_other_tensors_than_its_config_says(
    model: Path, tmp_path: Path, capsys, change, text: str
) -> None:
    rewrite(model / WEIGHTS, change)
    error = refused(capsys, model, tmp_path / "out", "--to", "megatron", "--tp", 2)
    assert "does not fit" in error and "transformer/config.json" in error and text in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kept", [0, 7, 300, -1])
def test_a_torn_model_file(model: Path, tmp_path: Path, capsys, kept: int) -> None:
    for folder in (model, model / "transformer"):
        (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:kept])
        error = refused(capsys, folder, tmp_path / "out", "--to", "fsdp", "--dp", 2)
        assert (
            WEIGHTS.name in error
            and "not a whole safetensors file" in error
            or "truncated" in error
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


CHECKPOINT = Path("checkpoints") / "step_000007"
LAST = CHECKPOINT / "rank_00001.safetensors"


def cut(run_folder: Path) -> None:
    (run_folder / LAST).write_bytes((run_folder / LAST).read_bytes()[:-1000])


def cut_and_sealed(run_folder: Path) -> None:
    cut(run_folder)
    seal(run_folder / CHECKPOINT)


def flip(run_folder: Path) -> None:
    data = bytearray((run_folder / LAST).read_bytes())
    data[-10] ^= 1
    (run_folder / LAST).write_bytes(data)


def lose(run_folder: Path) -> None:
    (run_folder / LAST).unlink()


def lose_and_seal(run_folder: Path) -> None:
    lose(run_folder)
    seal(run_folder / CHECKPOINT)


def forget(run_folder: Path) -> None:
    (run_folder / CHECKPOINT / "config.yaml").write_text("model: [\n")
    seal(run_folder / CHECKPOINT)


def move_base(run_folder: Path) -> None:
    (run_folder / CHECKPOINT / "config.yaml").write_text("model: {path: /nowhere/model}\n")
    seal(run_folder / CHECKPOINT)


def empty(run_folder: Path) -> None:
    shutil.rmtree(run_folder / CHECKPOINT)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut, "rank_00001.safetensors has "),
        (cut_and_sealed, "rank_00001.safetensors is truncated: tensor 'optim/exp_avg/transformer."),
        (flip, "does not match its fingerprint; the file is corrupt"),
        (lose, "rank_00001.safetensors is missing"),
        (
            lose_and_seal,
            "rank_00001.safetensors is missing; the checkpoint is incomplete, use the one before",
        ),
        (forget, "config.yaml names no model.path"),
        (
            move_base,
            (
                "was trained from /nowhere/model, which is not there; name the model folder with "
                "--base"
            ),
        ),
        (empty, "holds no checkpoint"),
    ],
)
@pytest.mark.parametrize("target", [("--to", "megatron", "--tp", "2"), ()])
def test_a_damaged_checkpoint(
    run_folder: Path, tmp_path: Path, capsys, damage, text: str, target
) -> None:
    damage(run_folder)
    if damage is flip and not target:
        target = (
            "--to",
            "megatron",
            "--tp",
            "4",
        )  # the moments, where it flipped, are no part of a pipeline
    assert text in refused(capsys, run_folder, tmp_path / "out", *target)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "without", ["model/transformer.proj_out.weight", "optim/exp_avg/transformer.proj_out.weight"]
)
def test_a_checkpoint_without_a_tensor(
    tiny_model: Path, tmp_path: Path, capsys, without: str
) -> None:
    """Weights must all be there; parameters that never had a gradient have no moments."""
    state = policy_state(tiny_model, {"model": 1.0, "optim/exp_avg": 0.5})
    del state[without]
    folder = write_checkpoint(tmp_path / "checkpoint", state, tiny_model)
    if without.startswith("optim"):
        assert run(folder, tmp_path / "out", "--to", "megatron", "--tp", 2) == 0
    else:
        error = refused(capsys, folder, tmp_path / "out")
        assert (
            f"{folder} does not fit" in error
            and "model: transformer.proj_out.weight is missing" in error
        )


def test_another_base_is_refused(run_folder: Path, tmp_path: Path, capsys) -> None:
    write_tiny_pipeline(tmp_path / "other", size="small")
    error = refused(capsys, run_folder, tmp_path / "out", "--base", tmp_path / "other")
    assert (
        "does not fit" in error and "transformer_blocks.2.attn.add_k_proj.bias is missing" in error
    )
    assert "is no diffusers model" in refused(
        capsys, run_folder, tmp_path / "out", "--base", run_folder
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def test_what_can_not_be_converted_is_said(
    tiny_model: Path, run_folder: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "text.safetensors").write_text("no weights")
    (tmp_path / "nothing").mkdir()
    for arguments, text in (
        (["nowhere"], "nowhere does not exist"),
        (
            [tmp_path / "nothing"],
            "is nothing that can be converted. Looked for: a run (checkpoints/step_…)",
        ),
        ([tmp_path / "text.safetensors"], "has no whole safetensors header"),
        ([tiny_model / "vae"], "is a 'AutoencoderKLQwenImage'; supported components: "),
        ([tiny_model, "--base", tiny_model], "is a whole model"),
        ([tiny_model, "--raw"], "--raw is for checkpoints"),
        ([run_folder, "--raw"], "--raw is for checkpoints with a running average, and"),
        ([tiny_model, "--step", 3], "is no run's folder"),
        ([run_folder, "--step", 3], "has no checkpoint of step 3, but step_000007"),
        ([tiny_model, "--to", "megatron"], "--to megatron needs --tp N"),
        ([tiny_model, "--tp", 2], "--tp 2 is for --to megatron, not for --to diffusers"),
        ([tiny_model, "--to", "fsdp", "--tp", 2], "--tp 2 is for --to megatron, not for --to fsdp"),
        (
            [tiny_model, "--to", "fsdp", "--dp", 2, "--dtype", "bfloat16"],
            "checkpoints (--to fsdp) hold float32",
        ),
        ([tiny_model, "--to", "merged"], "holds whole weights and no LoRA; give --to diffusers"),
    ):
        assert text in refused(capsys, arguments[0], tmp_path / "out", *arguments[1:])
    with pytest.raises(SystemExit, match="2"):
        run(tiny_model, tmp_path / "out", "--to", "megatron", "--tp", 0)
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_rows_are_refused(model: Path, tmp_path: Path, capsys) -> None:
    for count in (100_000, 10**15):
        error = refused(capsys, model, tmp_path / "out", "--to", "fsdp", "--dp", count)
        assert f"--dp {count}: the model's tensors have at most 768 rows" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
