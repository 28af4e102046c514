"""`megadiff doctor` names what is wrong with a model folder and a config, and how to mend it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.doctor import command, run_config
from megadiff.doctor.downloads import download_findings
from megadiff.doctor.finding import Finding
from megadiff.doctor.gpu_facts import GpuDevice, GpuFacts
from megadiff.doctor.machine import GIB
from megadiff.doctor.model import model_findings

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "assets" / "shapes"
WEIGHTS = Path("transformer/diffusion_pytorch_model.safetensors")
CONFIG = [str(ROOT / "configs/quickstart.yaml"), f"model.path={SHIPPED}"]
H200 = GpuDevice(name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=140 * GIB, capability="9.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(SHIPPED, tmp_path / "model")


def _problem(folder: Path) -> Finding:
    """Return the one error that a folder has."""
    (finding,) = [finding for finding in model_findings(folder) if finding.status != "ok"]
    assert finding.status == "error"
    assert finding.fix
    return finding


def _change_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_whole_model(folder: Path) -> None:
    found = {finding.name: finding for finding in model_findings(folder)}
    assert {finding.status for finding in found.values()} == {"ok"}
    assert "Qwen-Image (QwenImagePipeline)" in found["family"].text
    assert "2.48 M parameters, 4.74 MiB bfloat16" in found["transformer"].text
    assert "2.33 M of 2.48 M parameters in 4 blocks" in found["trained"].text
    assert found["download"].text.startswith("3 of 3 weight files")


def test_missing_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    finding = _problem(folder)
    assert f"{folder}/transformer holds neither" in finding.text
    assert finding.fix == "fetch the whole model folder"


def test_half_a_download(folder: Path) -> None:
    path = folder / WEIGHTS
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
    finding = _problem(folder)
    assert finding.text == f"{path} has {size // 2} bytes of {size}"
    assert "hf download REPOSITORY transformer/diffusion_pytorch_model.safetensors" in finding.fix


def test_header_that_is_cut_short(folder: Path) -> None:
    path = folder / WEIGHTS
    with path.open("r+b") as file:
        file.truncate(100)
    assert "has 100 bytes of " in _problem(folder).text


def test_link_to_nothing(folder: Path) -> None:
    """As the hub's cache has it where a file was never fetched."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/1a2b")
    finding = next(download_findings(folder))
    assert "links to ../../blobs/1a2b, which is not there" in finding.text


def test_file_that_is_no_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"<html>not found</html>")
    assert "22 bytes" in _problem(folder).text


def test_pointer_of_git_lfs(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert _problem(folder).fix.startswith("git lfs pull")


def test_download_that_goes_on(folder: Path) -> None:
    unfinished = folder / ".cache/huggingface/download/transformer/x.incomplete"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    finding = _problem(folder)
    assert "1 unfinished file, 0 should be there: x.incomplete" in finding.text


def _shards(folder: Path) -> Path:
    """Write the transformer as two files with an index, and return the index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        shard = f"part-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, (folder / WEIGHTS).with_name(shard))
        weight_map |= dict.fromkeys(part, shard)
    (folder / WEIGHTS).unlink()
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return index


def test_shards(folder: Path) -> None:
    index = _shards(folder)
    assert {finding.status for finding in model_findings(folder)} == {"ok"}
    content = json.loads(index.read_text())

    content["weight_map"]["lost.weight"] = "part-0.safetensors"
    index.write_text(json.dumps(content))
    (finding,) = download_findings(folder)
    assert "1 are not in their files: lost.weight" in finding.text

    del content["weight_map"]["lost.weight"]
    content["metadata"]["total_size"] *= 2
    index.write_text(json.dumps(content))
    (finding,) = download_findings(folder)
    assert (finding.status, finding.name) == ("warning", "download")

    (folder / "transformer/part-1.safetensors").unlink()
    assert "lacks part-1.safetensors, which" in _problem(folder).text
    index.write_text("{}")
    (finding,) = download_findings(folder)
    assert "is no index" in finding.text


def test_foreign_tensor(folder: Path) -> None:
    _change_weights(folder, lambda tensors: tensors.update(foreign=torch.zeros(2)))
    finding = _problem(folder)
    assert finding.name == "tensors"
    assert "not in the model: foreign" in finding.text
    assert "config.json" in finding.fix


def test_wrong_dtype(folder: Path) -> None:
    def quantise(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(torch.float8_e4m3fn)

    _change_weights(folder, quantise)
    finding = _problem(folder)
    assert finding.name == "dtype"
    assert "bytes float8_e4m3fn" in finding.text
    assert "bfloat16 release" in finding.fix


def test_unknown_family(folder: Path) -> None:
    index = folder / "model_index.json"
    content = json.loads(index.read_text()) | {"_class_name": "FluxPipeline"}
    index.write_text(json.dumps(content))
    finding = _problem(folder)
    assert finding.name == "family"
    assert "is a 'FluxPipeline'; supported pipelines: " in finding.text
    assert "adding_a_model.md" in finding.fix
    assert "give a diffusers pipeline folder" in _problem(folder / "absent").fix


def test_first_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(CONFIG)
    finding = run_config.refusal_finding(config, world_size=1)
    assert finding.status == "ok"
    assert "with 1 rank: dp=1 sp=1 tp=1, 1576 prompts" in finding.text

    config.train.prompts_per_step = 9
    finding = run_config.refusal_finding(config, world_size=2)
    assert finding.status == "error"
    assert "train.prompts_per_step=9 is not a multiple of dp=2" in finding.text
    assert finding.fix == "set train.prompts_per_step=10"


def test_plan() -> None:
    config = load_config(CONFIG)
    host = GpuFacts(devices=(H200,) * 4)
    finding = run_config.plan_finding(config, host, world_size=4, asked=0)
    assert finding.status == "ok"
    assert "fits on 4 GPUs of 140.0 GiB: " in finding.text

    small = GpuFacts(devices=(replace(H200, total_bytes=GIB),))
    finding = run_config.plan_finding(config, small, world_size=1, asked=0)
    assert finding.status == "error"
    assert "no layout fits on 1 GPU of 1.0 GiB: " in finding.text
    assert "> 0.9 GiB" in finding.text
    assert "megadiff plan CONFIG --world-size 1 " in finding.fix

    nowhere = run_config.plan_finding(config, GpuFacts(), world_size=1, asked=0)
    assert nowhere.status == "skipped"
    assert nowhere.fix.startswith("megadiff doctor CONFIG --world-size N;")


def test_size_of_a_checkpoint() -> None:
    """Masters and two moments of every trained weight, in float32; an average is one more."""
    config = load_config(CONFIG)
    whole = run_config.checkpoint_bytes(config)
    assert whole == run_config.folder_checkpoint_bytes(SHIPPED)
    elements = sum(tensor.numel() for tensor in load_file(SHIPPED / WEIGHTS).values())
    assert whole == 12 * elements
    config.algorithm.ema_decay = 0.9
    assert run_config.checkpoint_bytes(config) == 16 * elements
    config.lora.rank = 4
    assert run_config.checkpoint_bytes(config) < whole


def test_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--model replaces the config's; a broken one is named beside all that is as it should be."""
    monkeypatch.chdir(ROOT)
    runs = f"run.dir={folder.parent / 'runs'}"
    assert main(["doctor", *CONFIG, "--json", runs]) == 0, capsys.readouterr().out
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert "are needed for 3 checkpoints" in found["disk"]["text"]

    _change_weights(folder, lambda tensors: tensors.update(foreign=torch.zeros(2)))
    assert main(["doctor", *CONFIG, "--model", str(folder), runs]) == 1
    text = capsys.readouterr().out
    assert "error    tensors" in text and "1 error" in text
    assert "fix: fetch the component again" in text


def test_checkpoints_that_are_there_need_no_room(tmp_path: Path) -> None:
    """They were part of what the folder held when its free bytes were counted."""
    config = load_config([*CONFIG, f"run.dir={tmp_path}", "run.name=mine", "checkpoint.keep=2"])
    checkpoints = tmp_path / "mine" / "checkpoints"
    for num_there, words in ((0, "3 checkpoints"), (1, "2 checkpoints, beside 1"), (3, "1 check")):
        for step in range(num_there):
            (checkpoints / f"step_{step:06d}").mkdir(parents=True, exist_ok=True)
        (finding,) = command._disk_findings(config, needed_bytes=1)
        assert f"needed for {words}" in finding.text

    # Of another history, they stay.
    config.checkpoint.resume = "never"
    (finding,) = command._disk_findings(config, needed_bytes=1)
    assert "needed for 3 checkpoints" in finding.text
