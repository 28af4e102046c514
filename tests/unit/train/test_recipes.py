"""The recipes of full size fit their models: sizes, windows, components, rewards and prompts,
without any weights.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from megadiff.cli.main import main
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.data.prompts import load_prompts
from megadiff.diffusion.schedule import check_window
from megadiff.models.registry import build_adapter
from megadiff.planner.memory_plan import PHASES
from megadiff.rewards.score import Scorer
from megadiff.train.components import check_components, describe_components
from megadiff.train.sampling import sampling_of

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)  # where their paths start
    return load_config([str(request.param)])


def test_the_model_draws_at_the_recipes_size_and_no_component_is_forgotten(recipe: Config) -> None:
    if not (Path(recipe.model.path) / "scheduler").is_dir():  # assets/qwen_image has shapes only
        return
    adapter, sampling = build_adapter(Path(recipe.model.path)), sampling_of(recipe.rollout)
    adapter.validate(sampling)
    check_window(sampling)
    assert check_components(recipe, adapter, has_steps=True) == []
    components = describe_components(recipe, adapter)
    assert all(each["trained"] and each["pairs"] for each in components.values())
    assert len(components) == (2 if (Path(recipe.model.path) / "transformer_2").is_dir() else 1)


def test_the_rewards_can_score_the_prompts(recipe: Config) -> None:
    files = [recipe.data.prompts, *([recipe.eval.prompts] if recipe.eval.prompts else [])]
    prompts = [
        prompt
        for file in files
        for prompt in load_prompts(Path(file), max_chars=recipe.data.max_prompt_chars)
    ]
    with closing(Scorer(recipe.reward, num_workers=1)) as scorer:
        scorer.validate(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_the_prompts_suffice_for_a_step(recipe: Config) -> None:
    """A run refuses fewer."""
    prompts = load_prompts(Path(recipe.data.prompts), max_chars=recipe.data.max_prompt_chars)
    assert len(prompts) >= recipe.train.prompts_per_step


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_says_what_the_planner_does(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    header = re.sub(r"\n# ", " ", path.read_text().partition("\nrun:")[0])
    (world_size,) = re.findall(r"--world-size (\d+)", header)
    figures = header.partition("stay")[2].partition("Measured")[0]
    said = {
        name: float(gib) for name, gib in re.findall(rf"({'|'.join(PHASES)}) (\d+\.\d)", figures)
    }
    assert main(["plan", str(path), "--world-size", world_size, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    phases = found["layouts"][found["pick"]]["phases"]
    assert said == {name: round(sum(parts.values()) / 2**30, 1) for name, parts in phases.items()}
