"""A folder that is not a whole model is told by name, before an engine starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megadiff.models.registry import build_adapter, check_model_folder, component_model

CLASSES = {
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
INDEX = {"_class_name": "QwenImagePipeline", **CLASSES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The outline of a pipeline: the files that the check reads, with one small tensor each; the
    transformer is sharded.
    """
    for component in CLASSES:
        (tmp_path / component).mkdir()
        (tmp_path / component / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(json.dumps(INDEX))
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, tmp_path / "text_encoder" / "model.safetensors")
    save_file({"a": torch.zeros(8)}, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    shards = {
        "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "b": "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    for name, file in shards.items():
        save_file({name: torch.zeros(8)}, tmp_path / "transformer" / file)
    index = {"weight_map": shards}
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(index)
    )
    return tmp_path


def test_whole_folder(folder: Path) -> None:
    assert check_model_folder(folder).pipeline_class == "QwenImagePipeline"


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        ("model_index.json", "model_index.json does not exist"),
        ("vae", "lacks vae/"),
        ("scheduler/scheduler_config.json", "scheduler_config.json does not exist"),
        (
            "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
            (
                "lacks diffusion_pytorch_model-00002-of-00002.safetensors, which "
                "diffusion_pytorch_model.safetensors.index"
            ),
        ),
        ("text_encoder/model.safetensors", "text_encoder holds neither"),
        (".", "does not exist; give a diffusers pipeline folder"),
    ],
)
def test_missing_parts_are_named(folder: Path, missing: str, match: str) -> None:
    path = folder / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(ValueError, match=match):
        check_model_folder(folder)


def test_what_is_no_folder_is_told_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    with pytest.raises(ValueError, match=r"^afile is a file; give the folder with model_index"):
        check_model_folder(Path("afile"))

    hub = "hf download Qwen/Qwen-Image --local-dir models/qwen_image`, then model.path=models/qwen"
    with pytest.raises(ValueError, match=hub):
        check_model_folder(Path("Qwen/Qwen-Image"))
    with pytest.raises(ValueError, match=f"from here it is {tmp_path}/a/b/c$"):
        check_model_folder(Path("a/b/c"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vae": [None, None]}, "model_index.json lists no vae"),
        ({"transformer": ["my_package", "MyModel"]}, "lists no transformer"),
        ({"image_encoder": ["transformers", "CLIPVisionModel"]}, "lacks image_encoder/"),
        ({"transformer_2": ["diffusers", "QwenImageTransformer2DModel"]}, "lacks transformer_2/"),
        ({"image_processor": ["transformers", "CLIPImageProcessor"]}, "lacks image_processor/"),
    ],
)
def test_every_component_of_the_index_is_looked_for(
    folder: Path, change: dict[str, object], match: str
) -> None:
    (folder / "model_index.json").write_text(json.dumps(INDEX | change))
    with pytest.raises(ValueError, match=match):
        check_model_folder(folder)


def test_settings_of_a_pipeline_are_no_components(folder: Path) -> None:
    others = {"boundary_ratio": None, "transformer_2": [None, None], "feature_extractor": 3}
    (folder / "model_index.json").write_text(json.dumps(INDEX | others))
    check_model_folder(folder)


def test_truncated_and_empty_shards(folder: Path) -> None:
    shard = folder / "transformer" / "diffusion_pytorch_model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    for content in (whole[:-1], whole[:4], b"", b"\xff" * 64):
        shard.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r"diffusion_pytorch_model-00001-of-00002.safetensors \(\d+ bytes\) is not a "
            r"whole safetensors",
        ):
            check_model_folder(folder)


def test_other_pipelines_and_broken_json(folder: Path) -> None:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(
        ValueError, match="is a 'FluxPipeline'; supported pipelines: .*QwenImagePipeline"
    ):
        check_model_folder(folder)
    (folder / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match="model_index.json is not JSON"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ({}, "has no 'weight_map'"),
        ({"weight_map": ["x"]}, "has no 'weight_map'"),
        ({"weight_map": {"a": 1}}, "'a' is said to be in 1, which is no name of a file beside"),
        ({"weight_map": {"a": 1, "b": "x"}}, "'a' is said to be in 1"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "is no name of a file beside"),
        ({"weight_map": {"a": "/other/model.safetensors"}}, "is no name of a file beside"),
        ([], "holds a list"),
    ],
)
def test_a_damaged_index_is_named(folder: Path, index: object, match: str) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=match):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "4300"),
        ('{"a": 1, "a": 2}', "the key 'a' comes twice"),
    ],
)
def test_json_that_no_reader_takes_is_named(folder: Path, text: str, match: str) -> None:
    (folder / "vae" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"vae/config.json is not JSON: .*{match}"):
        check_model_folder(folder)


@pytest.mark.parametrize("value", [["QwenImagePipeline"], {"a": 1}, 7, None])
def test_a_class_name_that_is_none_is_named(folder: Path, value: object) -> None:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": value, "transformer_2": 3}))
    with pytest.raises(ValueError, match="supported pipelines: .*QwenImagePipeline"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"_class_name": "os.system"}, "is a 'os.system'; supported components: "),
        ({"_class_name": ["QwenImageTransformer2DModel"]}, "supported components: "),
        ({"num_attention_heads": "x"}, "num_attention_heads='x', not a whole number from 1 to"),
        ({"num_layers": 10**9}, "num_layers=1000000000, not a whole number"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"in_channels": None}, "in_channels=None"),
    ],
)
def test_a_transformer_of_no_size_is_named(
    tiny_model: Path, tmp_path: Path, change: dict[str, object], match: str
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for read in (lambda: build_adapter(model), lambda: component_model(model / "transformer")):
        with pytest.raises(ValueError, match=match):
            read()


@pytest.mark.parametrize("change", [{"axes_dims_rope": "abc"}, {"joint_attention_dim": [1]}])
def test_a_config_that_makes_no_module_is_named(
    tiny_model: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    path = model / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="config.json makes no QwenImageTransformer2DModel: "):
        component_model(model / "transformer")


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"vae_config": None}, "config.json and llm_config.json lack"),
        ("llm_config.json", {"rope_theta": "1e6"}, "rope_theta='1e6', not a number above 0"),
        ("llm_config.json", {"num_attention_heads": 27}, "num_heads=27 and num_kv_heads=4, of"),
        ("llm_config.json", {"hidden_size": 0}, "width=0, not a whole number from 1 to"),
    ],
)
def test_sizes_that_bagel_cannot_have_are_named(
    tmp_path: Path, file: str, changes: dict, message: str
) -> None:
    folder = shutil.copytree("assets/bagel", tmp_path / "bagel")
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        build_adapter(folder)
