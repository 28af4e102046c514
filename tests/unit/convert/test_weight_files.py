"""Indices, single files and variants: what DST holds is what a loader finds, and nothing stale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadiff.convert import jobs
from megadiff.tensors.model_files import ROOT_FILE
from tests.unit.convert.conversions import (
    WEIGHTS,
    contents,
    policy_state,
    refused,
    resaved,
    run,
    write_checkpoint,
)

INDEX = "model.safetensors.index.json"
AUTOENCODER = "ae.safetensors"


@pytest.fixture
def bagel(tiny_bagel: Path, tmp_path: Path) -> Path:
    """A BAGEL folder with an index of both files of its root, as published."""
    folder = shutil.copytree(tiny_bagel, tmp_path / "bagel")
    weight_map = {}
    total_size = 0
    for file in (ROOT_FILE, AUTOENCODER):
        tensors = load_file(folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return folder


def index_of(folder: Path) -> dict:
    return json.loads((folder / INDEX).read_text())


def test_an_index_in_the_root_keeps_what_other_files_hold(bagel: Path, tmp_path: Path) -> None:
    """vllm-omni reads no file that an index does not list."""
    assert run(bagel, tmp_path / "same", "--verify") == 0
    assert contents(tmp_path / "same") == contents(bagel)

    half = tmp_path / "half"
    assert run(bagel, half, "--dtype", "bfloat16", "--verify") == 0
    assert index_of(half)["weight_map"] == index_of(bagel)["weight_map"]
    assert AUTOENCODER in index_of(half)["weight_map"].values()
    stored = [*load_file(half / ROOT_FILE).values(), *load_file(half / AUTOENCODER).values()]
    assert index_of(half)["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)


def test_an_index_that_lists_what_is_not_there_is_refused_before_anything_is_written(
    bagel: Path, tmp_path: Path, capsys
) -> None:
    (bagel / AUTOENCODER).unlink()
    assert f"{AUTOENCODER} cannot be read" in refused(capsys, bagel, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bagel"]


def test_verify_reads_the_index(bagel: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    whole = jobs.new_index

    def without_autoencoder(*arguments):
        index = whole(*arguments)
        weight_map = index["weight_map"]
        index["weight_map"] = {k: v for k, v in weight_map.items() if v != AUTOENCODER}
        return index

    monkeypatch.setattr(jobs, "new_index", without_autoencoder)
    error = refused(capsys, bagel, tmp_path / "out", "--verify")
    assert f"of {AUTOENCODER} is not listed" in error and not (tmp_path / "out").exists()

    def with_one_too_many(*arguments):
        index = whole(*arguments)
        index["weight_map"]["nothing"] = ROOT_FILE
        return index

    monkeypatch.setattr(jobs, "new_index", with_one_too_many)
    error = refused(capsys, bagel, tmp_path / "out", "--verify")
    assert f"nothing is not in {ROOT_FILE}" in error


def test_the_roots_file_alone_is_a_source(bagel: Path, tmp_path: Path) -> None:
    for source in ([bagel / ROOT_FILE], [_moved(bagel, tmp_path), "--base", bagel]):
        out = tmp_path / f"out{len(source)}"
        assert run(*source, out, "--verify") == 0
        assert contents(out).keys() == {"config.json", "llm_config.json", ROOT_FILE}
        assert contents(out).items() <= contents(bagel).items()
        shards = tmp_path / f"shards{len(source)}"
        assert run(*source, shards, "--to", "fsdp", "--dp", 2) == 0
        assert run(shards, tmp_path / f"back{len(source)}") == 0
        assert contents(tmp_path / f"back{len(source)}") == contents(bagel)


def _moved(bagel: Path, tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    return Path(shutil.copyfile(bagel / ROOT_FILE, tmp_path / "elsewhere" / ROOT_FILE))


def test_another_models_file_of_that_name_is_one_like_others(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    average = {name: 0.5 * tensor for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(average, model / "transformer" / ROOT_FILE)
    shutil.copyfile(model / "transformer" / ROOT_FILE, model / "vae" / ROOT_FILE)

    # By its own path it is what is converted.
    assert run(model / "transformer" / ROOT_FILE, tmp_path / "alone", "--verify") == 0
    alone = load_file(tmp_path / "alone" / WEIGHTS.name)
    assert all(torch.equal(alone[name], tensor) for name, tensor in average.items())

    # Beside a component's weights it is not taken in their place.
    assert run(model / "transformer", tmp_path / "component", "--verify") == 0
    assert contents(tmp_path / "component") == contents(tiny_model / "transformer")

    # In another component's folder it is copied.
    assert run(model, tmp_path / "whole", "--verify") == 0
    copied = {str(path) for path in (Path("vae") / ROOT_FILE,)}
    assert contents(tmp_path / "whole").keys() == contents(tiny_model).keys() | copied


ROOT_WEIGHTS = [
    "whole.safetensors",
    "whole.ckpt",
    "whole.bin",
    "whole.pt",
    "whole.pth",
    "whole-Q4.gguf",
    "whole.safetensors.index.json",
]


def test_a_trained_export_lacks_the_bases_whole_checkpoints(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their weights are those before training, and user interfaces would load them."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    for name in [*ROOT_WEIGHTS, "LICENSE"]:
        (base / name).write_text("old")
    state = policy_state(base, {"model": 1.0})
    checkpoint = write_checkpoint(tmp_path / "run/checkpoints/step_000007", state, base)

    with caplog.at_level("INFO"):
        assert run(checkpoint, tmp_path / "out", "--verify") == 0
    assert contents(tmp_path / "out").keys() == contents(tiny_model).keys() | {
        "LICENSE",
        "README.md",
    }
    assert f"not copied from {base}" in caplog.text and "whole-Q4.gguf" in caplog.text

    # Weights that nobody trained are still the same.
    assert run(base, tmp_path / "same") == 0
    assert contents(tmp_path / "same") == contents(base)


@pytest.mark.parametrize("max_shard_size", ["10GB", "500KB"])
def test_a_variants_index_goes_with_its_files(
    tiny_model: Path, tmp_path: Path, max_shard_size: str
) -> None:
    model = resaved(tiny_model, tmp_path / "model", max_shard_size=max_shard_size)
    before = contents(model)
    shard = "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"
    index = json.dumps({"metadata": {}, "weight_map": {"weight": shard}})
    for name in (
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.fp16.safetensors.index.json",
        "diffusion_pytorch_model.bin.index.fp16.json",
    ):
        (model / "transformer" / name).write_text(index)
    save_file({"weight": torch.ones(2)}, model / "transformer" / shard)
    assert run(model, tmp_path / "out", "--verify") == 0
    assert contents(tmp_path / "out") == before
