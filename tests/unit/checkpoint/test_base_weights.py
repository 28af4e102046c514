"""A checkpoint of all weights knows those that it does not hold: frozen ones and constants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megadiff.checkpoint.base_weights import (
    ALL,
    NOT_STORED,
    base_difference,
    base_fingerprint,
    base_weights,
    tensor_fingerprints,
)
from megadiff.checkpoint.run_folders import progress_record
from megadiff.config.schema import Config
from megadiff.models.registry import build_adapter
from megadiff.tensors.model_files import ROOT_FILE, weight_files
from megadiff.types import Progress
from tests.meshes import one_rank_mesh
from tests.unit.convert.conversions import refused, run

FROZEN = "language_model.model.embed_tokens.weight"
TRAINED = "language_model.model.layers.0.mlp_moe_gen.up_proj.weight"


def base_of(model: Path, *, kl_coef: float = 0.0, lora_rank: int = 0) -> dict[str, str]:
    config = Config()
    config.algorithm.kl_coef = kl_coef
    config.lora.rank = lora_rank
    return base_weights(config, build_adapter(model), one_rank_mesh())


def scale(file: Path, name: str) -> None:
    tensors = load_file(file)
    tensors[name] = tensors[name] * 1.05
    save_file(tensors, file)


def test_frozen_weights_count_and_trained_ones_do_not(tiny_bagel: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bagel, tmp_path / "bagel")
    saved = base_of(folder)
    assert saved.keys() == {"path", NOT_STORED}
    # With a reference all of them count, and what a run without one saved is still compared.
    with_reference = base_of(folder, kl_coef=0.04)
    assert with_reference.keys() == {"path", ALL, NOT_STORED}
    assert with_reference[NOT_STORED] == saved[NOT_STORED]

    scale(folder / ROOT_FILE, TRAINED)
    assert base_difference(saved, base_of(folder)) == ""
    assert base_difference(saved, base_of(folder, kl_coef=0.04)) == ""
    assert base_difference(with_reference, base_of(folder, kl_coef=0.04))
    scale(folder / ROOT_FILE, FROZEN)
    for kl_coef in (0.0, 0.04):
        difference = base_difference(saved, base_of(folder, kl_coef=kl_coef))
        assert f"was trained over the weights of {folder} (fingerprint {saved[NOT_STORED]}" in (
            difference
        )


def test_a_constant_counts(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("sd35_medium"), tmp_path / "sd3")
    saved = base_of(folder)
    (file,) = weight_files(folder / "transformer")
    scale(file, "proj_out.weight")
    assert base_of(folder) == saved
    scale(file, "pos_embed.pos_embed")
    assert base_difference(saved, base_of(folder))


def test_bits_count_and_not_how_they_lie_in_files(tiny_model: Path, tmp_path: Path) -> None:
    """Scaled by 1.05: the same names, shapes and sizes."""
    assert base_of(tiny_model) == {}
    original = base_of(tiny_model, kl_coef=0.04)
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file(dict(sorted(tensors.items(), reverse=True)), file)
    same = base_of(folder, lora_rank=4)
    assert same["fingerprint"] == original["fingerprint"] and same["path"] != original["path"]
    save_file({name: 1.05 * tensor for name, tensor in tensors.items()}, file)
    assert base_of(folder, lora_rank=4)["fingerprint"] != original["fingerprint"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 200])
def test_a_base_is_the_same_however_many_ranks_hash_it(tiny_model: Path, world_size: int) -> None:
    files = {"transformer": weight_files(tiny_model / "transformer")}
    of_ranks = [
        tensor_fingerprints(files, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert base_fingerprint(of_ranks) == base_fingerprint([tensor_fingerprints(files)])
    assert sum(map(len, of_ranks)) == len(load_file(files["transformer"][0]))


def test_an_export_takes_no_other_frozen_weights(
    tiny_bagel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_bagel, tmp_path / "bagel")
    checkpoint = tmp_path / "checkpoint"
    assert run(folder, checkpoint, "--to", "fsdp", "--dp", 2) == 0
    (checkpoint / "config.yaml").write_text(json.dumps({"model": {"path": str(folder)}}))
    (checkpoint / "progress.json").unlink()
    record = progress_record(checkpoint, Progress(step=7, base=base_of(folder)))
    (checkpoint / "progress.json").write_bytes(record)

    assert run(checkpoint, tmp_path / "right", "--to", "diffusers") == 0
    scale(folder / ROOT_FILE, TRAINED)
    assert run(checkpoint, tmp_path / "as_right", "--to", "diffusers") == 0
    scale(folder / ROOT_FILE, FROZEN)
    error = refused(capsys, checkpoint, tmp_path / "out", "--to", "diffusers")
    assert f"was trained over the weights of {folder}" in error
    assert run(checkpoint, tmp_path / "meant", "--to", "diffusers", "--base", folder) == 0
