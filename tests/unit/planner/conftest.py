"""Every test of the planner shares adapters, and asks for plans of one recipe."""

import json

import pytest

from megadiff.cli.main import main
from megadiff.config.schema import LoraConfig
from megadiff.models.registry import build_adapter
from megadiff.planner.engine_memory import ModelShape
from megadiff.planner.work import model_shape
from tests.unit.planner.recipe import EAGER, MODEL, RECIPE, ROOT
from tests.unit.shared_adapters import adapters_are_shared

__all__ = ["adapters_are_shared"]


@pytest.fixture(scope="module")
def qwen() -> ModelShape:
    return model_shape(build_adapter(ROOT / "assets/qwen_image"), LoraConfig())


@pytest.fixture
def plan_text(capsys):
    """Arguments → what a plan of the recipe as it is prints; its exit code is as expected."""

    def run(*arguments: str, code: int = 0) -> str:
        assert main(["plan", RECIPE, MODEL, *arguments]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def plan(capsys):
    """Arguments → (the JSON plan, exit code)."""

    def run(*arguments: str, world_size: int = 4) -> tuple[dict, int]:
        size = ["--world-size", str(world_size), "--text-tokens", "64"]
        code = main(["plan", RECIPE, MODEL, *EAGER, *size, "--json", *arguments])
        return json.loads(capsys.readouterr().out), code

    return run
