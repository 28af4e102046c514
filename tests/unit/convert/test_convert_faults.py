"""What is wrong is named, with file and tensor; nothing half-written is left; the source stays as
it was.
"""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.tiny_models.qwen_image import write_tiny_pipeline
from megadiff.tensors.tensor_file import TensorWriter
from tests.unit.convert.conversions import (
    WEIGHTS,
    contents,
    policy_state,
    refused,
    rewrite,
    run,
    seal,
    write_checkpoint,
)

ROOT = Path(__file__).parents[3]
NAME = "transformer_blocks.1.attn.to_q.weight"


@pytest.fixture
def run_folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A run's folder with one checkpoint of two ranks."""
    state = policy_state(tiny_model, {"model": 1.0, "optim/exp_avg": 0.5})
    write_checkpoint(tmp_path / "run" / "checkpoints" / "step_000007", state, tiny_model)
    return tmp_path / "run"


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


def test_a_destination_in_the_way(model: Path, run_folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "link").symlink_to(model)
    before = contents(tmp_path)
    for out, text in (
        (model, "is what is read"),
        (tmp_path / "link", "is what is read"),
        (tmp_path, f"holds {model}, which is read"),
        (model / "sub" / "out", f"lies in {model}, which is read"),
        (
            tmp_path / "file",
            "exists and is not an empty folder; remove it, name another one, or give --force",
        ),
        (tmp_path / "full", "exists and is not an empty folder"),
    ):
        assert text in refused(capsys, model, out)
    assert "is no folder" in refused(capsys, model, tmp_path / "file", "--force")
    assert "could not be written: [Errno" in refused(capsys, model, tmp_path / "file" / "out")
    assert "holds" in refused(capsys, run_folder, run_folder.parent, "--force")
    assert contents(tmp_path) == before


def test_force_replaces_the_old_one_when_the_new_one_is_whole(
    model: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[:-1])
    refused(capsys, model, tmp_path / "out", "--force")
    assert contents(tmp_path / "out").keys() == {"old"}
    (model / WEIGHTS).write_bytes(whole)
    assert run(model, tmp_path / "out", "--force") == 0
    assert contents(tmp_path / "out") == contents(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_full_disk_leaves_nothing(model: Path, tmp_path: Path, capsys) -> None:
    """A file-size limit stands for the full disk: both fail in a write, after part of it was
    written.
    """
    before, limits = contents(model), resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    for target in (("--to", "diffusers"), ("--to", "fsdp", "--dp", 2)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
        try:
            error = refused(capsys, model, tmp_path / "out", "--force", *target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "out could not be written: " in error and "[Errno 27] File too large" in error
    assert contents(tmp_path / "out").keys() == {"old"} and contents(model) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_too_little_space_is_said_before_anything_is_written(
    model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 2_000_000)
    )
    error = refused(capsys, model, tmp_path / "out", "--to", "megatron", "--tp", 2)
    assert "needs 0.00" in error and "GiB are free" in error and not (tmp_path / "out").exists()
    sizes = {path: path.stat().st_size for path in model.rglob("*") if path.is_file()}
    rest = sum(size for path, size in sizes.items() if path.parent.name != "transformer")
    for free, code in ((sum(sizes.values()) - rest, 2), (sum(sizes.values()), 0)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(1 << 30, 1, free)
        )
        assert run(model, tmp_path / "out", "--to", "diffusers") == code


def test_verify_finds_a_bit_that_changed_on_its_way_to_the_disk(
    model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    write, spoiled = TensorWriter.write, []

    def spoil(self: TensorWriter, name: str, data: Tensor) -> None:
        if name.endswith(NAME) and not spoiled:
            data = data.clone()
            data[3, 5] += 1e-3
            spoiled.append(name)
        write(self, name, data)

    monkeypatch.setattr(TensorWriter, "write", spoil)
    error = refused(capsys, model, tmp_path / "out", "--dtype", "float32", "--verify")
    assert f"would hold other tensors than were read, 1 of 71: {NAME}" in error or NAME in error
    spoiled.clear()
    error = refused(capsys, model, tmp_path / "out", "--to", "fsdp", "--dp", 2, "--verify")
    assert NAME in error and "does not match its fingerprint" in error
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_rows_are_refused(model: Path, tmp_path: Path, capsys) -> None:
    for count in (100_000, 10**15):
        error = refused(capsys, model, tmp_path / "out", "--to", "fsdp", "--dp", count)
        assert f"--dp {count}: the model's tensors have at most 768 rows" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


FEW_FILES = (  # the converter where few files may be open; with "late", only once it writes
    "import os, resource, sys; from megadiff.convert.command import main\n"
    "from megadiff.convert import jobs\n"
    "def limit():\n"
    "    most = len(os.listdir('/proc/self/fd')) + 30\n"
    "    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
    "write = jobs.CheckpointJob.write\n"
    "def late(*args, **kwargs):\n"
    "    limit(); write(*args, **kwargs)\n"
    "if sys.argv[1] == 'late': jobs.CheckpointJob.write = late\n"
    "else: limit()\n"
    "sys.exit(main(sys.argv[2:]))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("early", "40 ranks, a file each, needs 40 files open at once, but this process may open"),
        ("late", "out could not be written: [Errno 24] Too many open files"),
    ],
)
def test_too_few_descriptors_leave_nothing(
    model: Path, tmp_path: Path, when: str, text: str
) -> None:
    options = [str(model), str(tmp_path / "out"), "--to", "fsdp", "--dp", "40"]
    command = [sys.executable, "-c", FEW_FILES, when, *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert process.returncode == 2 and text in process.stderr, process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


SLOW = (  # the converter, slow from its third write on
    "import sys, time; from megadiff.tensors.tensor_file import TensorWriter; from "
    "megadiff.convert.command import main\n"
    "write, count = TensorWriter.write, []\n"
    "def slow(*args, **kwargs):\n"
    "    count.append(0); write(*args, **kwargs); len(count) > 3 and time.sleep(2)\n"
    "TensorWriter.write = slow\n"
    "sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_killed_and_run_again(
    model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = contents(model)
    command = [
        sys.executable,
        "-c",
        SLOW,
        str(model),
        str(tmp_path / "out"),
        "--to",
        "fsdp",
        "--dp",
        "2",
    ]
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 60
    while (
        not list(tmp_path.glob(".out.writing-*/rank_00001*"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == code
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["model"] if number == signal.SIGTERM else left[0].startswith(".out.writing-")
    assert run(model, tmp_path / "out", "--to", "fsdp", "--dp", 2) == 0
    assert run(tmp_path / "out", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(model) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model", "out"]


def test_an_old_folder_whose_successor_never_came_is_put_back(
    model: Path, tmp_path: Path, capsys
) -> None:
    """Killed between the two renames of --force."""
    old = tmp_path / ".out.replaced-0123456789ab"
    old.mkdir()
    (old / "old").write_text("old")
    assert "exists and is not an empty folder" in refused(capsys, model, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"old"}


def test_another_converter_at_work_on_the_same_folder_is_left_alone(
    model: Path, tmp_path: Path
) -> None:
    from megadiff.process.whole_folder import whole_folder

    with pytest.raises(ValueError, match="was filled by another process meanwhile"):
        with whole_folder(tmp_path / "out", force=False) as aside:
            (aside / "mine").write_text("mine")
            assert run(model, tmp_path / "out") == 0
            assert (aside / "mine").read_text() == "mine"
    assert contents(tmp_path / "out") == contents(model)
