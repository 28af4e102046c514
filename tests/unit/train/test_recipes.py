"""The recipes of full size fit their models: sizes, windows, experts, rewards and prompts, without any weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.data.prompts import load_prompts
from megadiff.diffusion.schedule import check_window
from megadiff.models.registry import build_adapter
from megadiff.rewards.score import Scorer
from megadiff.train.experts import check_experts, describe_experts
from megadiff.train.rollout import sampling_of

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)  # where their paths start
    return load_config([str(request.param)])


def test_the_model_draws_at_the_recipes_size_and_no_expert_is_forgotten(recipe: Config) -> None:
    if not (Path(recipe.model.path) / "scheduler").is_dir():  # assets/qwen_image has shapes only
        return
    adapter, sampling = build_adapter(Path(recipe.model.path)), sampling_of(recipe.rollout)
    adapter.validate(sampling)
    check_window(
        sampling.num_inference_steps, window_size=sampling.sde_window_size, window_range=sampling.sde_window_range
    )
    assert check_experts(recipe, adapter, on_policy=True) == []
    experts = describe_experts(recipe, adapter)
    assert all(each["trained"] and each["pairs"] for each in experts.values())
    assert len(experts) == (2 if (Path(recipe.model.path) / "transformer_2").is_dir() else 1)


def test_the_rewards_can_score_the_prompts(recipe: Config) -> None:
    files = [recipe.data.prompts, *([recipe.eval.prompts] if recipe.eval.prompts else [])]
    prompts = [prompt for file in files for prompt in load_prompts(Path(file), max_chars=recipe.data.max_prompt_chars)]
    with closing(Scorer(recipe.reward, num_workers=1)) as scorer:
        scorer.validate(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_the_prompts_suffice_for_a_step(recipe: Config) -> None:
    """A run refuses fewer."""
    prompts = load_prompts(Path(recipe.data.prompts), max_chars=recipe.data.max_prompt_chars)
    assert len(prompts) >= recipe.train.prompts_per_step
