"""Settings that a supervised run refuses: its data, and what pairs need."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megadiff.algorithms import Algorithm, build_algorithm
from megadiff.config.load import ConfigError, load_config
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.train.check_algorithm import check_algorithm

BASE = """
run: {name: test, device: cpu}
model: {path: somewhere}
train: {num_steps: 1, prompts_per_step: 2}
rollout: {height: 64, width: 64}
optim: {lr: 1e-4}
"""
SFT = ("algorithm.name=sft", "data.images=photos")
DPO = ("algorithm.name=offline_dpo", "data.pairs=pairs")


def loaded(folder: Path, *overrides: str) -> tuple[Config, Algorithm]:
    (folder / "c.yaml").write_text(BASE)
    config = load_config([str(folder / "c.yaml"), *overrides])
    return config, build_algorithm(config.algorithm)


def check(config: Config, algorithm: Algorithm) -> None:
    validate(config, dp=1, on_policy=algorithm.on_policy)
    check_algorithm(config, algorithm)


@pytest.mark.parametrize("overrides", [SFT, DPO, (*DPO, "algorithm.noise_levels=7", "seed=1")])
def test_what_is_fine(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check(*loaded(tmp_path, *overrides))


def test_the_config_of_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/preference_pairs.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "preferred.yaml").write_text(text)
    config = load_config([str(tmp_path / "preferred.yaml")])
    check(config, build_algorithm(config.algorithm))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("algorithm.name=sft",), "algorithm.name=sft needs data.images: a folder with metadata"),
        (("algorithm.name=offline_dpo",), "algorithm.name=offline_dpo needs data.pairs: a folder"),
        (
            (*SFT, "data.pairs=pairs"),
            "data.pairs=pairs with algorithm.name=sft, which trains on data.images; set data.pairs",
        ),
        (
            (*DPO, "data.images=photos"),
            "data.images=photos with algorithm.name=offline_dpo, which trains on data.pairs",
        ),
        (
            (*DPO, "algorithm.group_size=4"),
            "algorithm.group_size=4 with .*noise_levels=2 times; set algorithm.group_size=1",
        ),
        (
            (*DPO, "train.microbatch_size=3"),
            "microbatch_size=3 is odd.*set train.microbatch_size=4",
        ),
        (
            (*DPO, "train.updates_per_step=2", "algorithm.group_size=2"),
            "train.updates_per_step=2 with algorithm.name=offline_dpo, which has no use for it",
        ),
        ((*DPO, "algorithm.kl_coef=0.1"), "algorithm.kl_coef=0.1 with algorithm.name=offline_dpo"),
        (
            (*SFT, "algorithm.trained_samples=1"),
            "algorithm.trained_samples=1 with algorithm.name=sft, which has no use for it",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*loaded(tmp_path, *overrides))


def test_given_images_have_no_stochastic_steps(tmp_path: Path) -> None:
    config, algorithm = loaded(tmp_path, *SFT)
    with pytest.raises(ConfigError, match="rows='steps'.*set rows to levels or pairs"):
        check_algorithm(config, replace(algorithm, rows="steps"))
