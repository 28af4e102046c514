"""A config that contradicts its algorithm is refused with both numbers and the fix."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megadiff.algorithms import ALGORITHMS, Algorithm, build_algorithm
from megadiff.config.algorithm import with_algorithm_defaults
from megadiff.config.load import ConfigError, load_config
from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.config.validate import validate
from megadiff.train.check_algorithm import (
    CONSTANTS,
    check_algorithm,
    constants_without_use,
    unbalanced_rewards,
)

BASE = """
run: {name: test}
model: {path: model}
data: {prompts: prompts.txt}
train: {num_steps: 3, prompts_per_step: 4, microbatch_size: 4}
algorithm: {group_size: 4}
rollout: {height: 64, width: 64, num_inference_steps: 6, sde_window_range: [0, 5]}
optim: {lr: 1e-4}
reward: {color: {type: color}}
"""
CLEAN = "rollout.sde_window_size=0"
FP8 = "rollout.fp8=true model.dtype=bfloat16"
AHEAD = "train.staleness=1 rollout.mode=separate rollout.registry=folder"
SFT = "algorithm.name=sft data.images=photos"
OFFLINE_DPO = "algorithm.name=offline_dpo data.pairs=pairs algorithm.group_size=1"


@pytest.fixture
def checked(tmp_path: Path):
    """Load, validate and check a config with these overrides."""
    base = tmp_path / "base.yaml"
    base.write_text(BASE)
    return partial(check_file, base)


def check_file(path: Path, *overrides: str) -> None:
    config = load_config([str(path), *overrides])
    algorithm = build_algorithm(config.algorithm)
    validate(config, dp=1, on_policy=algorithm.on_policy)
    check_algorithm(config, algorithm)


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.name=flow_grpo algorithm.trained_steps=2",
        "algorithm.name=grpo_guard rollout.sde_type=dance_sde",
        "algorithm.name=flow_dppo rollout.sde_type=flow_cps rollout.eta=0.8",
        f"algorithm.name=nft {CLEAN} algorithm.noise_levels=6 algorithm.lagging_decay=0.5",
        f"algorithm.name=awm {CLEAN} algorithm.noise_levels=5",
        f"algorithm.name=awm {CLEAN} algorithm.lagging_kl_coef=1 algorithm.lagging_decay=0.3",
        f"algorithm.name=rwr {CLEAN} algorithm.trained_samples=2 train.updates_per_step=2",
        f"algorithm.name=rwr {CLEAN} algorithm.beta=0.17",
        f"algorithm.name=rwr {CLEAN} algorithm.beta=0.1 algorithm.adv_clip_max=3",
        f"algorithm.name=nft {CLEAN} algorithm.beta=0.1",
        f"algorithm.name=dpo {CLEAN} algorithm.noise_levels=4 train.updates_per_step=2",
        f"{AHEAD} algorithm.old_log_prob=recompute",
        f"{AHEAD} algorithm.name=nft {CLEAN}",
        f"{FP8} algorithm.old_log_prob=auto",
        f"{FP8} parity.mode=warn",
        # their losses have no ratio to the replicas' log_probs
        f"{FP8} algorithm.name=grpo_guard",
        f"{FP8} algorithm.name=flow_dppo",
        f"{FP8} algorithm.name=nft {CLEAN}",
        SFT,
        OFFLINE_DPO,
        f"{OFFLINE_DPO} algorithm.noise_levels=7 seed=1",
    ],
)
def test_what_fits_together_passes(checked, overrides: str) -> None:
    checked(*overrides.split())


@pytest.mark.parametrize(
    "overrides, text",
    [
        (
            f"algorithm.name=flow_grpo {CLEAN}",
            "rollout.sde_window_size=0 with algorithm.name=flow_grpo, which trains stochastic "
            "steps; set rollout.sde_window_size, e.g. to 2",
        ),
        (
            "algorithm.name=grpo_guard rollout.sde_type=flow_cps",
            "rollout.sde_type=flow_cps with algorithm.name=grpo_guard, whose ratio needs a log "
            "density; set rollout.sde_type to dance_sde or flow_sde",
        ),
        (
            "algorithm.name=flow_grpo algorithm.trained_steps=3",
            "algorithm.trained_steps=3 > rollout.sde_window_size=2; set trained_steps to at most "
            "that",
        ),
        (
            "algorithm.step_weight=level rollout.sde_window_moves=25",
            "algorithm.step_weight=level with rollout.sde_window_moves=25: a step would be weighed "
            "against its own window alone; set sde_window_moves=0, or step_weight=none",
        ),
        (
            "algorithm.name=nft",
            "rollout.sde_window_size=2 with algorithm.name=nft, which trains clean samples at "
            "drawn noise levels, not stochastic steps; set rollout.sde_window_size=0",
        ),
        (
            f"{AHEAD} algorithm.old_log_prob=auto",
            "train.staleness=1 with algorithm.old_log_prob=auto and algorithm.name=flow_grpo: a "
            "ratio to log_probs of weights one step older does not start at 1, and is clipped for "
            "that; set algorithm.old_log_prob=recompute, or train.staleness=0",
        ),
        (
            FP8,
            "rollout.fp8 with algorithm.old_log_prob=rollout and algorithm.name=flow_grpo: FP8 "
            "log_probs are further from the trainer's than any clip range in use, and the gate "
            "would refuse them; set algorithm.old_log_prob=auto",
        ),
        (
            f"algorithm.name=awm {CLEAN} rollout.component_windows=balanced",
            "set rollout.component_windows=any",
        ),
        (
            f"algorithm.name=nft {CLEAN} algorithm.old_log_prob=recompute",
            "algorithm.old_log_prob=recompute with algorithm.name=nft",
        ),
        (f"algorithm.name=nft {CLEAN} algorithm.trained_steps=1", "set algorithm.trained_steps=0"),
        (f"algorithm.name=dpo {CLEAN} algorithm.step_weight=level", "algorithm.step_weight=none"),
        (
            f"algorithm.name=nft {CLEAN} algorithm.noise_levels=7",
            "algorithm.noise_levels=7 > 6, the levels that algorithm.name=nft draws from with "
            "rollout.num_inference_steps=6; set algorithm.noise_levels<=6",
        ),
        (f"algorithm.name=awm {CLEAN} algorithm.noise_levels=6", "algorithm.noise_levels<=5"),
        (
            f"algorithm.name=rwr {CLEAN} algorithm.lagging_decay=0.5",
            "algorithm.lagging_decay=0.5 with algorithm.name=rwr: nothing uses a lagging policy; "
            "set algorithm.lagging_decay=0",
        ),
        (f"algorithm.name=awm {CLEAN} algorithm.lagging_decay=0.5", "nothing uses a lagging"),
        (
            f"algorithm.name=rwr {CLEAN} algorithm.beta=0.1",
            "algorithm.adv_clip_max=5.0 / algorithm.beta=0.1 = 50 > 30 with algorithm.name=rwr: a "
            "sample weighs up to exp(50), and its squared gradient may leave float32; "
            "set algorithm.beta>=0.17, or a smaller adv_clip_max",
        ),
        (
            f"algorithm.name=dpo {CLEAN} algorithm.kl_coef=0.1",
            "algorithm.kl_coef=0.1 with algorithm.name=dpo, whose loss has no such term",
        ),
        (
            f"algorithm.name=nft {CLEAN} algorithm.lagging_decay=0.5 algorithm.lagging_kl_coef=1",
            "algorithm.lagging_kl_coef=1.0 with algorithm.name=nft, whose loss has no such term",
        ),
        (
            f"algorithm.name=awm {CLEAN} algorithm.lagging_kl_coef=1",
            "algorithm.lagging_kl_coef=1.0 with algorithm.name=awm needs a lagging policy; "
            "set algorithm.lagging_decay",
        ),
        (
            "algorithm.trained_samples=5",
            "algorithm.trained_samples=5 > algorithm.group_size=4; set it to at most that, or 0",
        ),
        (
            "algorithm.trained_samples=3 train.updates_per_step=2",
            "algorithm.trained_samples=3 is not a multiple of train.updates_per_step=2",
        ),
        (
            f"algorithm.name=dpo {CLEAN} algorithm.group_size=1",
            "algorithm.group_size=1 < 2: advantages are relative to a group; set "
            "algorithm.group_size, e.g. to 16",
        ),
        (
            f"algorithm.name=dpo {CLEAN} algorithm.trained_samples=2",
            "algorithm.trained_samples=2 with algorithm.name=dpo, which trains the best and the "
            "worst of a group; set algorithm.trained_samples=0",
        ),
        (
            f"algorithm.name=dpo {CLEAN} train.microbatch_size=3",
            "train.microbatch_size=3 is odd, and a pair may not be split; set "
            "train.microbatch_size=4",
        ),
        (
            f"algorithm.name=dpo {CLEAN} algorithm.noise_levels=3 train.updates_per_step=2",
            "algorithm.noise_levels=3 is not a multiple of train.updates_per_step=2: each update "
            "takes equally many of a pair's levels",
        ),
        (
            f"algorithm.name=nft {CLEAN} rollout.same_noise=true",
            "samples of one noise are alike",
        ),
        ("algorithm.name=sft", "algorithm.name=sft needs data.images: a folder with metadata"),
        ("algorithm.name=offline_dpo", "algorithm.name=offline_dpo needs data.pairs: a folder"),
        (
            f"{SFT} data.pairs=pairs",
            "data.pairs=pairs with algorithm.name=sft, which trains on data.images; set data.pairs",
        ),
        (
            f"{OFFLINE_DPO} data.images=photos",
            "data.images=photos with algorithm.name=offline_dpo, which trains on data.pairs",
        ),
        (
            f"{OFFLINE_DPO} algorithm.group_size=4",
            "algorithm.group_size=4 with algorithm.name=offline_dpo: of each pair the noise is "
            "drawn algorithm.noise_levels=2 times; set algorithm.group_size=1",
        ),
        (
            f"{OFFLINE_DPO} train.updates_per_step=2 algorithm.group_size=2",
            "train.updates_per_step=2 with algorithm.name=offline_dpo, which has no use for it",
        ),
    ],
)
def test_contradictions_are_refused_with_the_fix(checked, overrides: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        checked(*overrides.split())


def test_given_images_have_no_stochastic_steps() -> None:
    config = Config(algorithm=AlgorithmConfig(name="sft"))
    algorithm = replace(build_algorithm(config.algorithm), rows="steps")
    with pytest.raises(ConfigError, match="rows='steps'.*set rows to levels or pairs"):
        check_algorithm(config, algorithm)


def test_the_config_of_the_page_on_pairs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/preference_pairs.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "preferred.yaml").write_text(text)
    check_file(tmp_path / "preferred.yaml")


@pytest.mark.parametrize(
    "name, settings, unused",
    [
        ("flow_grpo", {"beta": 0.1, "kl_limit": 1e-4, "clip_range": 1e-5}, ["beta", "kl_limit"]),
        ("flow_grpo", {"clip_range_high": 1e-3, "adv_clip_max": 2.0}, []),
        ("grpo_guard", {"clip_range": 1e-5, "matching": "t2"}, ["matching"]),
        ("flow_dppo", {"kl_limit": 1e-4, "clip_range": 1e-5}, ["clip_range"]),
        ("nft", {"clip_range": 1e-5, "beta": 0.1}, ["clip_range"]),
        ("awm", {"matching": "t2", "clip_range_high": 2.0, "beta": 0.1}, ["beta"]),
        ("rwr", {"beta": 0.5, "clip_range_high": 1e-3}, ["clip_range_high"]),
        ("dpo", {"beta": 50.0, "adv_clip_max": 2.0}, ["adv_clip_max"]),
        ("sft", {"beta": 50.0}, ["beta"]),
        ("sft", {}, []),
        # spelling a default out is no mistake
        ("nft", {"clip_range": 1e-4, "matching": "ghuber"}, []),
    ],
)
def test_constants_without_use_are_named(name: str, settings: dict, unused: list[str]) -> None:
    config = with_algorithm_defaults(AlgorithmConfig(name=name, **settings))
    expected = [f"algorithm.{key}={settings[key]}" for key in unused]
    assert sorted(constants_without_use(config, build_algorithm(config))) == sorted(expected)


@pytest.mark.parametrize(
    ("advantage", "only", "weight", "warns"),
    [
        ("global", {"tag": "art"}, 1.0, True),
        ("none", {"tag": "art"}, 1.0, True),
        ("group", {"tag": "art"}, 1.0, False),
        ("gdpo", {"tag": "art"}, 1.0, False),
        ("global", {"tag": "ocr"}, 1.0, False),
        ("global", {"tag": "art"}, 0.0, False),  # only watched
    ],
)
def test_rewards_of_unlike_prompts_are_warned_of(
    advantage: str, only: dict, weight: float, warns: bool
) -> None:
    config = Config()
    config.algorithm.advantage = advantage
    config.reward = {
        "text": RewardConfig(type="ocr", only={"tag": "ocr"}),
        "taste": RewardConfig(type="pickscore", weight=weight, only=only),
    }
    warning = unbalanced_rewards(config)
    assert bool(warning) == warns
    if warns:
        assert f"algorithm.advantage={advantage} with reward.text.only={{'tag': 'ocr'}}" in warning
        assert "reward.taste.only={'tag': 'art'}" in warning
        assert "set algorithm.advantage=group or gdpo" in warning


def test_the_constants_of_every_loss_are_known() -> None:
    """A constant that the table lacks would go unnamed, and one renamed would be named wrongly."""
    config = AlgorithmConfig()
    taken = set().union(
        *(
            build_algorithm(replace(config, name=name)).loss.keywords
            for name in ALGORITHMS
            if name != "sft"
        )
    )
    # refused where a loss lacks them, or no constants of the config
    others = {"kl_coef", "lagging_kl_coef", "step_weight", "old"}
    assert taken - others == set().union(*CONSTANTS.values())


OWN = """
from megadiff.algorithms import Algorithm
from megadiff.algorithms.flow_matching import flow_matching

limits = []

def mine(config):
    limits.append(config.adv_clip_max)
    return Algorithm(loss=flow_matching, rows="levels", first_level=2)

def none(config):
    return flow_matching
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_algorithms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_algorithms"
    sys.modules.pop("own_algorithms", None)


def test_an_algorithm_of_another_package(checked, own_module: str) -> None:
    name = f"{own_module}:mine"
    algorithm = build_algorithm(AlgorithmConfig(name=name))
    assert isinstance(algorithm, Algorithm) and algorithm.first_level == 2
    assert sys.modules[own_module].limits == [5.0]  # zeros are filled in
    checked(f"algorithm.name={name}", CLEAN)
    with pytest.raises(ConfigError, match="algorithm.noise_levels=5 > 4"):
        checked(f"algorithm.name={name}", CLEAN, "algorithm.noise_levels=5")


@pytest.mark.parametrize(
    "name, text",
    [
        ("ppo", "algorithm.name='ppo' is not one of flow_grpo, grpo_guard, .*module:function"),
        ("missing_module:mine", "No module named 'missing_module'; give an importable module"),
        ("own_algorithms:other", "has no attribute 'other'; give an importable module and a"),
        ("own_algorithms:none", "returned function; return a megadiff.algorithms.Algorithm"),
    ],
)
def test_what_is_no_algorithm_is_named(own_module: str, name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_algorithm(AlgorithmConfig(name=name))
