"""A text in an override, and in a saved config, stays what was typed."""

import random
from pathlib import Path

import pytest

from megadiff.config.load import (
    ConfigError,
    load_config,
    load_rewards,
    override,
    save_config,
    to_dict,
)

BASE = [
    "run.name=base",
    "model.path=model",
    "train.num_steps=3",
    "train.prompts_per_step=4",
    "rollout.height=64",
    "rollout.width=64",
    "optim.lr=1e-4",
]
ODD_CHARACTERS = ("\\", "$", "${", "{", "}", "'", '"', "#", ":", " ", "a", "0", "é", "\n", "=")


@pytest.mark.parametrize(
    "name", ["010", "2026_01_15", "12:30", "1e3", "1.10", "on", "0x10", "a #b", "a: b", "@x", "*x"]
)
def test_a_name_is_what_was_typed(name: str) -> None:
    """YAML reads another value in each of them, or none."""
    assert load_config([*BASE, f"run.name={name}"]).run.name == name
    config = load_config([*BASE, f"reward.ocr.type={name}", f"judge.qwen.model={name}"])
    assert config.reward["ocr"].type == config.judge["qwen"].model == name


def test_quotes_null_and_interpolations_are_yamls() -> None:
    for typed, name in (("'010'", "010"), ('"a b"', "a b"), (" x ", "x"), ("${run.dir}", "runs")):
        assert load_config([*BASE, f"run.name={typed}"]).run.name == name
    for typed in ("null", "", "[x]", "{a: b}"):
        with pytest.raises(ConfigError, match=r"run\.name"):
            load_config([*BASE, f"run.name={typed}"])


def test_an_override_gives_exactly_its_text() -> None:
    rng = random.Random(0)
    texts = ["null", "", "[x", " a ", "${run.dir}"]
    texts += ["".join(rng.choices(ODD_CHARACTERS, k=6)) for _ in range(20)]
    for text in texts:
        assert load_config([*BASE, override("run.name", text)]).run.name == text


@pytest.mark.parametrize("text", ["${x}", r"\${x}", "a ${", "010", "on", "null", "a #b\n\u00e9"])
def test_a_saved_config_keeps_its_texts(tmp_path: Path, text: str) -> None:
    reward = ["reward.own.type=color", override("reward.own.args.template", text)]
    config = load_config([*BASE, *reward, override("run.name", text)])
    assert config.reward["own"].args == to_dict(config)["reward"]["own"]["args"]
    assert (config.run.name, to_dict(config)["reward"]["own"]["args"]["template"]) == (text, text)

    save_config(config, tmp_path / "saved.yaml")
    assert load_config([str(tmp_path / "saved.yaml")]) == config


@pytest.mark.parametrize("text", ["5", "run: ${nope}", "run: {name: '${nope}'}", "seed: ${seed}"])
def test_a_file_that_gives_no_config_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_config([*BASE, str(file)])


def test_an_interpolation_that_leads_nowhere_is_named() -> None:
    argument = "run.name=${nope}"
    with pytest.raises(ConfigError, match="argument 'run.name.*run.name: .*'nope' not found"):
        load_config([*BASE, argument, "seed=1"])
    with pytest.raises(ConfigError, match=r"reward\.own\.type: .*'nope' not found"):
        load_rewards([*BASE, "reward.own.type=${nope}"])
    with pytest.raises(ConfigError, match="no config file"):
        load_config(["x" * 300])


def test_a_dotted_name_in_yaml_is_to_be_nested(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text, nested in (
        ("run.name: q", "run: {name: …}"),
        ("reward.ocr.type: ocr", "reward: {ocr: {type: …}}"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"nest it: {nested}"):
            load_config([*BASE, str(file)])
