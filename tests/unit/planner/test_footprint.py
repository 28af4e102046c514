"""What a replica is said to take is what its folder holds."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from megadiff.models.registry import build_adapter
from megadiff.planner.footprint import replica_weights


def elements(file: Path, part: str = "") -> int:
    """Count the elements of a file's tensors whose names have this part."""
    with safe_open(file, framework="pt") as tensors:
        names = [name for name in tensors.keys() if part in name]
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)


def test_every_network_counts_the_second_expert_too(tiny_wan: dict[str, Path]) -> None:
    for model in tiny_wan.values():
        sizes = dict.fromkeys(("transformer", "text_encoder", "vae"), 0)
        for path in model.glob("*/*.safetensors"):
            sizes[path.parent.name.removesuffix("_2")] += elements(path)
        found = replica_weights(build_adapter(model), dtype="bfloat16")
        assert found.transformers == 2 * sizes["transformer"] and found.unknown == ()
        assert found.others == 2 * (sizes["text_encoder"] + sizes["vae"])
        assert found.encoder == 2 * sizes["text_encoder"]


def test_a_root_folder_counts_all_that_its_files_hold(tiny_bagel: Path) -> None:
    """But for the autoencoder: vllm-omni builds the published one, whatever the tiny one is."""
    adapter = build_adapter(tiny_bagel)
    stored = elements(tiny_bagel / "ema.safetensors")
    networks = adapter.root_networks()
    autoencoder = networks.pop("autoencoder")
    found = replica_weights(adapter, dtype="bfloat16")
    assert found.transformers + 2 * sum(networks.values()) == 2 * stored
    assert found.others == 2 * (sum(networks.values()) + autoencoder)
    assert 83e6 < autoencoder < 84e6
    assert (found.encoder, found.unknown) == (0, ())


def test_a_vision_tower_counts_where_images_are_given(
    tiny_folder: Callable[[str], Path],
) -> None:
    adapter = build_adapter(tiny_folder("qwen_image_edit_2511"))
    blind = replica_weights(adapter, dtype="bfloat16")
    seeing = replica_weights(adapter, dtype="bfloat16", sees_images=True)
    tower = elements(adapter.model_folder / "text_encoder/model.safetensors", "visual.")
    assert seeing.others - blind.others == 2 * tower > 0
    assert seeing.encoder == blind.encoder


def test_half_a_download_is_sized_by_its_config(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    for name in ("text_encoder", "transformer"):
        for file in (model / name).glob("*.safetensors"):
            file.rename(file.with_name("model-00001-of-00002.safetensors"))
        index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
        (model / name / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = replica_weights(build_adapter(tiny_model), dtype="bfloat16")
    assert replica_weights(build_adapter(model), dtype="bfloat16") == whole


def test_published_bagel_is_sized_without_weights() -> None:
    """Its folder of shapes has no weights. SigLIP's 26 layers, FLUX.1's autoencoder: known."""
    networks = build_adapter(Path("assets/bagel")).root_networks()
    assert networks == {
        "language head": 152064 * 3584 + 3584,
        "vision tower": 437_095_328,
        "autoencoder": 83_819_683,
    }
