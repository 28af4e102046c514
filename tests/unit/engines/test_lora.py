"""A checkpoint and a run with another adapter, or none, do not go together: both are named, and
what to set.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megadiff.config.schema import Config, LoraConfig
from megadiff.engines.lora import check_lora, check_start, lora_values, open_source, read_start
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter
from megadiff.parallel.lora import lora_shapes, lora_spec, start_values
from megadiff.tensors.lora_files import DIFFUSERS_WEIGHTS
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.tensors.source_folder import SourceFolder
from megadiff.types import LoraSpec
from tests.lora_tensors import write_lora

SPEC = LoraSpec(rank=4, alpha=8.0, modules=("a", "b"))


@pytest.mark.parametrize(
    ("saved", "ours", "message"),
    [
        (
            SPEC,
            None,
            r"a LoRA of rank 4 and alpha 8.0 only, but lora.rank=0; set lora.rank=4 lora.alpha=8.0",
        ),
        (None, SPEC, r"whole trained weights and no LoRA, but lora.rank=4; set lora.rank=0"),
        (
            SPEC,
            LoraSpec(rank=2, alpha=8.0, modules=("a", "b")),
            r"of rank 4, but lora.rank=2; set lora.rank=4",
        ),
        (
            SPEC,
            LoraSpec(rank=4, alpha=4.0, modules=("a", "b")),
            r"of alpha 8.0, but lora.alpha=4.0; .*lora.alpha=8.0",
        ),
        (
            SPEC,
            LoraSpec(rank=4, alpha=8.0, modules=("b", "c")),
            r"of 2 modules.*wraps 2: only there \['a'\], only here \['c'\]; set lora.targets and",
        ),
    ],
)
def test_refusals(saved, ours, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_lora(_folder(tmp_path, saved), ours)


@pytest.mark.parametrize("lora", [None, SPEC])
def test_what_goes_together(lora, tmp_path):
    check_lora(_folder(tmp_path, lora), lora)


def test_pieces_of_a_start_are_parts_of_one_tensor(tiny_model: Path) -> None:
    shards = [
        Shard(local=torch.empty(1, 3), offsets=(1, 2), shape=(2, 5)),
        Shard(local=torch.empty(0, 5), offsets=(2, 0), shape=(2, 5)),  # more ranks than rows
    ]
    read_start(SourceFolder(tiny_model / "transformer"), "a.lora_A.weight", shards, seed=5)
    assert torch.equal(shards[0].local, start_values("a.lora_A.weight", (2, 5), seed=5)[1:2, 2:5])


def _folder(tmp_path, lora: LoraSpec | None) -> ShardFolder:
    values = {"optimizer_steps": {}} | ({"lora": lora_values(lora)} if lora else {})
    Snapshot(shards={}, rank=0, num_files=1, values=values).write(tmp_path)
    return ShardFolder(tmp_path)


TARGETS = {"rank": 4, "alpha": 6.0, "targets": ["to_q", "to_out.0"]}


@pytest.fixture(scope="module")
def lora_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(build_adapter(tiny_model), tmp_path_factory.mktemp("start"))


def _write(adapter: ModelAdapter, folder: Path, component: str = "transformer") -> Path:
    """A random LoRA of TARGETS, as our export writes it."""
    parameters = adapter.empty_transformer(component).named_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    spec = lora_spec(LoraConfig(**TARGETS), adapter.plan, shapes)
    write_lora(folder, spec, lora_shapes(spec, shapes))
    return folder


def test_a_start_is_cut_as_a_fresh_one(tiny_model: Path, lora_folder: Path) -> None:
    config = Config()
    config.lora = LoraConfig(**TARGETS, start=str(lora_folder))
    adapter = build_adapter(tiny_model)
    check_start(config.lora, adapter)
    source = open_source(config, adapter, "transformer")
    stored = load_file(lora_folder / DIFFUSERS_WEIGHTS)
    assert {f"transformer.{name}" for name in source.lora} == stored.keys()
    name = next(iter(source.lora))
    whole = stored[f"transformer.{name}"]
    shard = Shard(local=torch.empty(2, 3), offsets=(1, 0), shape=tuple(whole.shape))
    read_start(source, name, [shard], seed=0)
    assert torch.equal(shard.local, whole[1:3, :3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": "gone"}, "lora.start=gone does not exist; give the folder of"),
        ({"rank": 3}, "holds a LoRA of rank 4, but lora.rank=3; set lora.rank=4 lora.alpha=6.0"),
        ({"alpha": 0.0}, "holds a LoRA of alpha 6.0, but lora.alpha=4.0; set lora.rank=4"),
        (
            {"targets": ["to_q"]},
            "holds a LoRA of 4 modules, this run wraps 2: only there "
            "['transformer_blocks.0.attn.to_out.0', 'transformer_blocks.1.attn.to_out.0'], "
            "only here []; set lora.targets and lora.exclude to the modules that it has",
        ),
        ({"targets": ["to_p"]}, "lora.targets: 'to_p' is the end of none of the"),
    ],
)
def test_a_start_that_is_not_the_run_s(
    tiny_model: Path, lora_folder: Path, changes: dict[str, object], words: str
) -> None:
    config = LoraConfig(**TARGETS | {"start": str(lora_folder)} | changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        check_start(config, build_adapter(tiny_model))


def test_a_start_of_another_model_or_of_none(
    tiny_model: Path, lora_folder: Path, tmp_path: Path
) -> None:
    adapter = build_adapter(tiny_model)
    with pytest.raises(ValueError, match="is no LoRA; give the folder of `megadiff convert"):
        check_start(LoraConfig(**TARGETS, start=str(tmp_path)), adapter)
    parameters = adapter.empty_transformer().named_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    spec = lora_spec(LoraConfig(**TARGETS), adapter.plan, shapes)
    wider = {
        name: tuple(size + 1 if size != 4 else 4 for size in shape)
        for name, shape in lora_shapes(spec, shapes).items()
    }
    write_lora(tmp_path, spec, wider)
    with pytest.raises(
        ValueError, match="does not fit transformer of the model: .* is for a weight"
    ):
        check_start(LoraConfig(**TARGETS, start=str(tmp_path)), adapter)


def test_a_model_of_two_components_starts_from_a_folder_for_each(
    tiny_wan: dict[str, Path], tmp_path: Path
) -> None:
    adapter = build_adapter(tiny_wan["t2v_a14b"])
    config = LoraConfig(**TARGETS, start=str(tmp_path))
    first, second = adapter.components
    _write(adapter, tmp_path / first, first)
    with pytest.raises(ValueError, match=f"holds those of {first}, and .* the folders {first}, "):
        check_start(config, adapter)
    alone = LoraConfig(**TARGETS, start=str(tmp_path / first))
    with pytest.raises(ValueError, match="holds one LoRA, and training begins with one for each"):
        check_start(alone, adapter)
    shutil.copytree(tmp_path / first, tmp_path / second)
    check_start(config, adapter)
