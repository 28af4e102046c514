"""A checkpoint becomes a pipeline that diffusers loads with exactly its weights, or nothing is left of the attempt."""

from __future__ import annotations

import importlib.util
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor

from megadiff.models.qwen_image.tiny import write_tiny_pipeline
from megadiff.weights.shards import Shard, write_shards

ROOT = Path(__file__).parents[3]
WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"
KINDS = {"model": 1.0, "average": 0.5}  # what each kind of weights is of the base's


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_ckpt", ROOT / "tools" / "convert_ckpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def restore_signals():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run's folder with one checkpoint of two ranks, of weights that are not the base's."""
    write_checkpoint(tmp_path / "run", tiny_model, KINDS)
    return tmp_path / "run"


def write_checkpoint(run: Path, model: Path, kinds: dict[str, float]) -> None:
    folder = run / "checkpoints" / "step_000007"
    source = load_file(model / WEIGHTS)
    tensors = {
        f"{kind}/transformer.{name}": scaled(value, factor)
        for kind, factor in kinds.items()
        for name, value in source.items()
    }
    for rank in range(2):
        shards = {name: [part_of(tensor, rank)] for name, tensor in tensors.items() if rank == 0 or tensor.ndim > 1}
        write_shards(folder, shards, rank=rank, num_files=2, values={"optimizer_steps": 7})
    (folder / "progress.json").write_text("{}")
    (folder / "config.yaml").write_text(f"model: {{path: {model}}}\n")
    (run / "checkpoints" / "latest").write_text("step_000007\n")


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return factor * (tensor + 1e-3)


def part_of(tensor: Tensor, rank: int) -> Shard:
    """Matrices lie on both ranks, by rows; vectors on the first."""
    if tensor.ndim == 1:
        return Shard(local=tensor, offsets=(0,), shape=tuple(tensor.shape))
    middle = (len(tensor) + 1) // 2
    rows = slice(0, middle) if rank == 0 else slice(middle, len(tensor))
    return Shard(local=tensor[rows], offsets=(rows.start, 0), shape=tuple(tensor.shape))


@pytest.mark.parametrize(("options", "kind"), [([], "average"), (["--raw"], "model")])
def test_the_pipeline_holds_exactly_the_weights(
    tool: ModuleType, run: Path, tiny_model: Path, tmp_path: Path, options: list[str], kind: str
) -> None:
    out = tmp_path / "deep" / "out"
    assert tool.main([str(run), str(out), "--dtype", "float32", *options]) == 0
    transformer = QwenImagePipeline.from_pretrained(out).transformer
    source = load_file(tiny_model / WEIGHTS)
    assert transformer.state_dict().keys() == source.keys()
    for name, value in transformer.state_dict().items():
        assert torch.equal(value, scaled(source[name], KINDS[kind])), name
    same = [path.relative_to(tiny_model) for path in tiny_model.rglob("*") if path.is_file()]
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == set(same)
    assert all((out / path).read_bytes() == (tiny_model / path).read_bytes() for path in same if path != WEIGHTS)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_weights_are_cast_once_and_a_checkpoint_without_average_gives_its_own(
    tool: ModuleType, tiny_model: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "run", tiny_model, {"model": 1.0})
    (tmp_path / "out").mkdir()  # an empty folder is taken
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000007"
    assert tool.main([str(checkpoint), str(tmp_path / "out")]) == 0
    held = load_file(tmp_path / "out" / WEIGHTS)
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    source = load_file(tiny_model / WEIGHTS)
    assert all(torch.equal(value, scaled(source[name], 1.0).bfloat16()) for name, value in held.items())
    assert QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer").config.num_layers


def test_a_base_in_several_files_becomes_one(tool: ModuleType, run: Path, tiny_model: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    QwenImageTransformer2DModel.from_pretrained(base / "transformer").save_pretrained(
        base / "new", max_shard_size="500KB"
    )
    shutil.rmtree(base / "transformer")
    (base / "new").rename(base / "transformer")
    assert len(list((base / "transformer").glob("*.safetensors"))) > 1
    assert tool.main([str(run), str(tmp_path / "out"), "--base", str(base)]) == 0
    files = sorted(path.name for path in (tmp_path / "out" / "transformer").iterdir())
    assert files == ["config.json", WEIGHTS.name]
    QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")


def cut(run: Path) -> None:
    file = run / "checkpoints" / "step_000007" / "rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def flip(run: Path) -> None:
    file = run / "checkpoints" / "step_000007" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)


def lose(run: Path) -> None:
    (run / "checkpoints" / "step_000007" / "rank_00001.safetensors").unlink()


def forget(run: Path) -> None:
    (run / "checkpoints" / "step_000007" / "config.yaml").write_text("model: [\n")


def move_base(run: Path) -> None:
    (run / "checkpoints" / "step_000007" / "config.yaml").write_text("model: {path: /nowhere/model}\n")


def empty(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut, "rank_00001.safetensors is truncated"),
        (flip, "does not match its checksum; the file is corrupt"),
        (lose, "rank_00001.safetensors is missing; the checkpoint is incomplete, use the one before"),
        (forget, "config.yaml names no model.path"),
        (move_base, "was trained from /nowhere/model, which is not there; name the model folder with --base"),
        (empty, "is neither a checkpoint (no progress.json) nor a run with one (no checkpoints/latest)"),
    ],
)
def test_damage_is_named_and_nothing_is_left(tool: ModuleType, run: Path, tmp_path: Path, capsys, damage, text) -> None:
    damage(run)
    assert tool.main([str(run), str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_another_base_is_refused(tool: ModuleType, run: Path, tmp_path: Path, capsys) -> None:
    write_tiny_pipeline(tmp_path / "other", size="small")
    assert tool.main([str(run), str(tmp_path / "out"), "--base", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert "other/transformer does not fit what" in error and "not in the model: transformer_blocks.2." in error
    assert tool.main([str(run), str(tmp_path / "out"), "--base", str(run)]) == 2
    assert "model_index.json does not exist" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def test_a_place_that_cannot_be_written(tool: ModuleType, run: Path, tiny_model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("kept")
    for out, text in (
        (run, "exists and is not an empty folder; remove it or name another one"),
        (tmp_path / "file", "exists and is not an empty folder"),
        (tmp_path / "file" / "out", "could not be written: [Errno 20] Not a directory"),
    ):
        assert tool.main([str(run), str(out)]) == 2
        assert text in capsys.readouterr().err
    base = shutil.copytree(tiny_model, tmp_path / "base")
    assert tool.main([str(run), str(base / "sub" / "out"), "--base", str(base)]) == 2
    assert "lies in" in capsys.readouterr().err and not (base / "sub").exists()
    assert (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_leaves_nothing(tool: ModuleType, run: Path, tmp_path: Path, capsys) -> None:
    """A file-size limit stands for the full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        assert tool.main([str(run), str(tmp_path / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "out could not be written: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_stopped_in_the_middle_it_leaves_nothing(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, 'tools'); import convert_ckpt\n"
        "import megadiff.weights.export as export\n"
        "export.save_file = lambda *_, **__: time.sleep(60)\n"
        f"sys.exit(convert_ckpt.main([{str(run)!r}, {str(tmp_path / 'out')!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.writing-*/vae")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 143
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
