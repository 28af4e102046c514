"""Families that are not megadiff's own: named in the config, or registered by another package."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from examples.static_shift import StaticShiftAdapter
from megadiff.models import registry
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.registry import build_adapter, check_model_folder, component_model, families

OUTSIDE = "examples.static_shift:StaticShiftAdapter"


class AnotherQwenImage(QwenImageAdapter):
    """Claims the pipeline class of a family that is there."""


class Untitled(QwenImageAdapter):
    title = ""


class LostPipeline(QwenImageAdapter):
    rollout_pipeline = "no_such_package.pipeline:Pipeline"


class NoFamily:
    pass


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model as a pipeline of the example's class."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    path = folder / "model_index.json"
    index = json.loads(path.read_text()) | {"_class_name": StaticShiftAdapter.pipeline_class}
    path.write_text(json.dumps(index))
    return folder


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Register a class as an installed package would."""

    def install(value: str) -> None:
        entry = EntryPoint(name="example", value=value, group=registry.ENTRY_POINTS)
        monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
        families.cache_clear()

    yield install
    families.cache_clear()


def test_a_family_named_by_the_config(model: Path) -> None:
    with pytest.raises(ValueError, match="is a 'StaticShiftPipeline'; supported pipelines: .*Wan"):
        build_adapter(model)
    assert check_model_folder(model, OUTSIDE) is StaticShiftAdapter
    assert isinstance(build_adapter(model, OUTSIDE), StaticShiftAdapter)


def test_a_family_of_an_installed_package(model: Path, install) -> None:
    install(OUTSIDE)
    assert isinstance(build_adapter(model), StaticShiftAdapter)
    # a folder of its transformer alone may be of two families now, of one plan
    shapes = component_model(model / "transformer").shapes
    assert shapes == component_model(model / "transformer", OUTSIDE).shapes


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("no_such_module:Family", "model.family=no_such_module:Family: module 'no_such_module' "),
        ("examples.static_shift:StaticShift", "has no 'StaticShift' .did you mean"),
        ("examples.static_shift", "has no ''"),
        (f"{__name__}:NoFamily", "'NoFamily' is not a class derived from .*ModelAdapter"),
        (f"{__name__}:Untitled", "Untitled lacks title; set these class attributes"),
        (f"{__name__}:LostPipeline", "but there is no module 'no_such_package.pipeline'"),
        (
            "megadiff.models.wan22.adapter:WanAdapter",
            "is a 'StaticShiftPipeline'; supported by model.family=.*WanAdapter: WanPipeline",
        ),
    ],
)
def test_a_family_that_is_none_is_refused(model: Path, family: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build_adapter(model, family)


def test_an_entry_point_that_names_none_says_whose_it_is(model: Path, install) -> None:
    install("no_such_module:Family")
    with pytest.raises(ValueError, match="entry point example: module 'no_such_module' cannot"):
        build_adapter(model)


def test_two_families_for_one_pipeline_class(tiny_model: Path, install) -> None:
    install(f"{__name__}:AnotherQwenImage")
    with pytest.raises(
        ValueError,
        match="is a 'QwenImagePipeline' for .*:QwenImageAdapter and .*:AnotherQwenImage; "
        "choose by model.family=megadiff",
    ):
        build_adapter(tiny_model)
    chosen = build_adapter(tiny_model, f"{__name__}:AnotherQwenImage")
    assert isinstance(chosen, AnotherQwenImage)
