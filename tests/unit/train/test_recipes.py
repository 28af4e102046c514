"""The recipes of full size fit their models: sizes, windows, components, rewards and prompts,
without any weights.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from megadiff.algorithms import build_algorithm
from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.data.prompts import load_prompts
from megadiff.diffusion.schedule import check_window
from megadiff.models.registry import build_adapter, families
from megadiff.planner.memory_plan import PHASES
from megadiff.rewards.score import Scorer
from megadiff.train.check import read_prompts
from megadiff.train.check_algorithm import check_algorithm
from megadiff.train.components import check_components, describe_components
from megadiff.train.sampling import sampling_of
from tests.unit.shared_adapters import adapters_are_shared  # noqa: F401

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))
ALGORITHMS = sorted((ROOT / "configs/recipes/algorithms").glob("*.yaml"))  # laid over a recipe


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)  # where their paths start
    return load_config([str(request.param)])


def names(files: list[Path]) -> str:
    return "+".join(file.stem for file in files)


LAYERS = [[recipe] for recipe in RECIPES]
LAYERS += [[recipe, algorithm] for recipe in RECIPES for algorithm in ALGORITHMS]


@pytest.mark.parametrize("files", LAYERS, ids=names)
def test_the_model_draws_at_the_recipes_size_and_no_component_is_forgotten(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config([str(file) for file in files])
    algorithm = build_algorithm(config.algorithm)
    validate(config, dp=1)
    check_algorithm(config, algorithm)
    sampling = sampling_of(config.rollout)
    check_window(sampling)
    adapter = build_adapter(Path(config.model.path))
    adapter.validate(sampling)
    has_steps = algorithm.rows == "steps"
    assert check_components(config, adapter, has_steps=has_steps) == []
    components = describe_components(config, adapter)
    for component in components.values():
        assert component["trained"]
        assert component["pairs"] or not has_steps
        assert component["steps"]
    assert len(components) == (2 if (Path(config.model.path) / "transformer_2").is_dir() else 1)


def test_the_model_takes_the_prompts_and_the_rewards_can_score_them(recipe: Config) -> None:
    """Given images as well, each of which is decoded."""
    adapter = build_adapter(Path(recipe.model.path))
    files = [recipe.data.prompts, *([recipe.eval.prompts] if recipe.eval.prompts else [])]
    prompts = []
    for file in files:
        prompts += read_prompts(recipe, file, adapter)
    with closing(Scorer(recipe.reward, num_workers=1)) as scorer:
        scorer.validate(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_every_family_has_a_recipe() -> None:
    with_recipe = {type(build_adapter(ROOT / model_path(path))).title for path in RECIPES}
    assert with_recipe == {family.title for family in families()}


def model_path(path: Path) -> str:
    return load_config([str(path)]).model.path


def test_the_prompts_suffice_for_a_step(recipe: Config) -> None:
    """A run refuses fewer."""
    prompts = load_prompts(Path(recipe.data.prompts), max_chars=recipe.data.max_prompt_chars)
    assert len(prompts) >= recipe.train.prompts_per_step


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_says_what_the_planner_does(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert header_peaks(path) == planned_peaks([path], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_algorithm_over_a_recipe_takes_no_more_memory(
    path: Path,
    algorithm: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their headers say so."""
    monkeypatch.chdir(ROOT)
    said = header_peaks(path)
    planned = planned_peaks([path, algorithm], capsys)
    assert planned.keys() == said.keys()
    for phase, gib in planned.items():
        assert gib <= said[phase], phase


def header_of(path: Path) -> str:
    return re.sub(r"\n# ", " ", path.read_text().partition("\nrun:")[0])


def header_peaks(path: Path) -> dict[str, float]:
    """Return phase → GiB a GPU, as the recipe's header says."""
    figures = header_of(path).partition("stay")[2].partition("Measured")[0]
    said = re.findall(rf"({'|'.join(PHASES)}) (\d+\.\d)", figures)
    return {phase: float(gib) for phase, gib in said}


def planned_peaks(files: list[Path], capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return phase → GiB a GPU in the layout that the planner picks for the first file's GPUs."""
    header = header_of(files[0])
    (world_size,) = re.findall(r"--world-size (\d+)", header)
    (gpu,) = re.findall(r"--gpu (\w+)", header) or ["h200"]
    command = ["plan", *map(str, files), "--world-size", world_size, "--gpu", gpu, "--json"]
    assert main(command) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pick"] is not None, "no layout fits"
    phases = plan["layouts"][plan["pick"]]["phases"]
    return {name: round(sum(parts.values()) / 2**30, 1) for name, parts in phases.items()}
