"""`megadiff check` says of every family's published layout what would be trained and how
large it is, and names what a damaged one lacks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.tiny_models.families import FAMILIES
from megadiff.cli.main import main
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.tensors.model_files import weight_files

TinyFolder = Callable[[str], Path]
Run = Callable[..., tuple[int, str]]
ASSETS = Path(__file__).parents[3] / "assets"
# the config files that are published with these keys and no others
PUBLISHED_FILES = ("scheduler/scheduler_config.json", "transformer/config.json")


@dataclass(frozen=True, kw_only=True)
class Published:
    """Say of a tiny folder what `megadiff check` must find.

    shapes: the folder of assets/ whose model_index.json and keys it gets, "" for that of its name.
    lacks: keys of those that this model's transformer has not.
    """

    title: str
    heads: str
    shapes: str = ""
    networks: tuple[str, ...] = ("transformer", "text_encoder", "vae")
    lacks: tuple[str, ...] = ()


SD3 = Published(
    title="Stable Diffusion 3 and 3.5",
    heads="4 heads of 16",
    networks=("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae"),
)
EDIT = Published(title="Qwen-Image-Edit", heads="4 heads of 32")
WAN = Published(title="Wan2.1 and Wan2.2", heads="4 heads of 24")
EXPERTS = ("transformer", "transformer_2", "text_encoder", "vae")
PUBLISHED = {
    "qwen_image": Published(title="Qwen-Image", heads="4 heads of 32"),
    "qwen_image_edit_2509": replace(EDIT, shapes="qwen_image_edit_2511", lacks=("zero_cond_t",)),
    "qwen_image_edit_2511": EDIT,
    "wan21_t2v_1_3b": WAN,
    "wan22_ti2v_5b": WAN,
    "wan22_t2v_a14b": replace(WAN, networks=EXPERTS),
    "wan22_i2v_a14b": replace(WAN, title="Wan2.2 I2V", networks=EXPERTS),
    "sd3_medium": replace(SD3, shapes="sd35_medium", lacks=("dual_attention_layers", "qk_norm")),
    "sd35_medium": SD3,
    "sd35_large": SD3,
    "z_image": Published(title="Z-Image", heads=""),
    "bagel": Published(
        title="BAGEL 7B-MoT",
        heads="4 heads of 16",
        networks=("transformer", "language head", "vision tower", "autoencoder"),
    ),
}
BAGEL = "bagel"
PIPELINES = [name for name in PUBLISHED if name != BAGEL]


@pytest.fixture
def published(tiny_folder: TinyFolder, tmp_path: Path) -> Callable[[str], Path]:
    """Return what makes a family's folder as it is published: index, keys, weights in shards."""

    def make(name: str) -> Path:
        folder = shutil.copytree(tiny_folder(name), tmp_path / name)
        if name == BAGEL:
            return folder
        expected = PUBLISHED[name]
        shapes = ASSETS / (expected.shapes or name)
        shutil.copy(shapes / "model_index.json", folder)
        for file in PUBLISHED_FILES:
            _keep_keys(folder / file, _json(shapes / file).keys() - set(expected.lacks))
        if (folder / "transformer_2").is_dir():
            keys = _json(shapes / "transformer_2/config.json").keys()
            _keep_keys(folder / "transformer_2/config.json", keys)
        for component in ("transformer", "text_encoder"):
            (file,) = weight_files(folder / component)
            _shard(file)
        return folder

    return make


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(_json(path) | changes))


def _keep_keys(path: Path, keys: Iterable[str]) -> None:
    """Leave those keys of a config that are published, all of which it must have."""
    values = _json(path)
    path.write_text(json.dumps({key: values[key] for key in keys}))


def _shard(file: Path) -> None:
    """Write a file's tensors as two, with an index, under the names that libraries give them."""
    tensors = load_file(file)
    names = sorted(tensors)
    stem = file.name.removesuffix(".safetensors")
    places: dict[str, str] = {}
    for number, half in enumerate((names[::2], names[1::2]), start=1):
        shard = f"{stem}-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, file.with_name(shard))
        places |= dict.fromkeys(half, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    file.with_name(f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()


def _stored(folder: Path) -> int:
    """Count the elements of a component's files."""
    count = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return count


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs `megadiff check` and gives its code and all that it wrote."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_all_families_are_here() -> None:
    assert PUBLISHED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_says_what_would_be_trained(
    name: str, published: Callable[[str], Path], run: Run
) -> None:
    folder = published(name)
    expected = PUBLISHED[name]
    code, text = run(folder)
    assert code == 0, text
    assert text.startswith(f"{folder}: {expected.title} (")
    assert expected.heads in text
    assert "LoRA of rank 64: " in text
    assert "whole: nothing is missing" in text

    code, text = run(folder, "--json")
    facts = json.loads(text)
    assert (code, facts["problems"]) == (0, [])
    components = {component["name"]: component for component in facts["components"]}
    assert set(components) == set(expected.networks)
    assert facts["trained"]["tp"] == [1, 2, 4]
    assert facts["trained"]["num_blocks"] > 0
    assert (facts["schedule"]["sigmas"][0], facts["schedule"]["sigmas"][-1]) == (1, 0)
    if name == BAGEL:
        return
    for component in components.values():
        constants = facts["trained"]["constants"] if component["is_trained"] else ()
        if not constants:
            assert component["num_parameters"] == _stored(folder / component["name"])
        assert sum(component["num_bytes"].values()) == 4 * _stored(folder / component["name"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_loads(name: str, published: Callable[[str], Path]) -> None:
    """Through the names and keys that are published: every transformer, and the text encoder."""
    folder = published(name)
    assert check_model_folder(folder).title == PUBLISHED[name].title
    adapter = build_adapter(folder)
    grey = torch.full((32, 32, 3), 128, dtype=torch.uint8)
    with adapter.prompt_encoder(dtype=torch.float32, device=torch.device("cpu")) as encode:
        texts = encode(["a red circle"], [(grey,)])
    assert all(len(value) == 1 for value in texts.values())
    if name == BAGEL:  # tests/distributed/test_bagel_engines.py loads its transformer
        return
    for component in adapter.components:
        loaded = adapter.module_class().from_pretrained(folder / component)
        shapes = {name: p.shape for name, p in adapter.empty_transformer().named_parameters()}
        assert {name: p.shape for name, p in loaded.named_parameters()} == shapes


def test_a_missing_shard_is_named(published: Callable[[str], Path], run: Run) -> None:
    folder = published("qwen_image")
    shard = "diffusion_pytorch_model-00002-of-00002.safetensors"
    (folder / "transformer" / shard).unlink()
    code, text = run(folder)
    assert code == 1
    assert f"problem: {folder}/transformer lacks {shard}, which" in text
    assert "fetch the whole folder" in text


def test_a_truncated_file_is_named(published: Callable[[str], Path], run: Run) -> None:
    folder = published("qwen_image")
    path = folder / "text_encoder" / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    code, text = run(folder)
    assert code == 1
    assert f"problem: {path} ({path.stat().st_size} bytes) is not a whole safetensors file" in text


@pytest.mark.parametrize("name", PIPELINES)
def test_another_class_is_named(name: str, published: Callable[[str], Path], run: Run) -> None:
    folder = published(name)
    _change(folder / "transformer/config.json", _class_name="FluxTransformer2DModel")
    code, text = run(folder)
    assert code == 1
    assert f"{folder}/transformer is a 'FluxTransformer2DModel'; supported components: " in text
    _change(folder / "model_index.json", _class_name="FluxPipeline")
    code, text = run(folder)
    assert code == 2
    assert f"error: {folder} is a 'FluxPipeline'; supported pipelines: " in text


@pytest.mark.parametrize("name", PIPELINES)
def test_weights_of_another_size_are_named(
    name: str, published: Callable[[str], Path], run: Run
) -> None:
    """As where a config was fetched from another model of the family."""
    folder = published(name)
    key = build_adapter(folder).size_keys[0]
    path = folder / "transformer" / "config.json"
    _change(path, **{key: _json(path)[key] + 1})
    code, text = run(folder)
    assert code == 1
    assert "does not fit its config: missing " in text or "its experts differ" in text


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("ae.safetensors", "ae.safetensors is not a whole safetensors file: "),
        ("ema.safetensors", "ema.safetensors is not a whole safetensors file: "),
        ("llm_config.json", "llm_config.json does not exist; fetch the whole model folder"),
        ("tokenizer_config.json", "tokenizer_config.json does not exist"),
    ],
)
def test_a_missing_file_of_bagel_is_named(
    file: str, words: str, published: Callable[[str], Path], run: Run
) -> None:
    folder = published(BAGEL)
    (folder / file).unlink()
    code, text = run(folder)
    assert code == 1
    assert f"problem: {folder}/{words}" in text


def test_damages_of_bagel_are_named(published: Callable[[str], Path], run: Run) -> None:
    folder = published(BAGEL)
    path = folder / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    code, text = run(folder)
    assert code == 1
    assert f"problem: {path} ({path.stat().st_size} bytes) is not a whole safetensors" in text
    _change(folder / "config.json", architectures=["JanusForConditionalGeneration"])
    code, text = run(folder)
    assert code == 2
    assert "error: " in text
    assert "model_index.json" in text
