"""Whatever ends the writing, nothing half-written is left, and the source stays as it was."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import Tensor

from megadiff.tensors.tensor_file import TensorWriter
from tests.unit.convert.conversions import NAME, WEIGHTS, contents, refused, run

ROOT = Path(__file__).parents[3]


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
