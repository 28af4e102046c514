"""A text in an override, and in a saved config, stays what was typed."""

import random

import pytest

from megadiff.config.load import ConfigError, load_config, override

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
