"""Odd values of every key are refused by a ConfigError that names the key, or fit for a run."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megadiff.config.load import ConfigError, all_keys, load_config
from megadiff.config.rewards import NAMED_SECTIONS
from megadiff.config.schema import FIELDS, Config
from megadiff.config.validate import validate
from tests.unit.config.test_config import BASE

ODD = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "1e39": 1e39,
    "-1": -1.0,
    "10**21": 10**21,
    "-10**21": -(10**21),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "base.yaml"
    path.write_text(BASE)
    return str(path)


@pytest.fixture(scope="module")
def config(base: str) -> Config:
    return load_config([base, "optim.component_lr={transformer: 1e-4}"])


def keys_of(kind: type) -> list[str]:
    """The schema's keys whose value is a number of this kind."""
    return [
        f"{section}.{name}"
        for (section, name), field in FIELDS.items()
        if field.type == kind.__name__ and section and section not in NAMED_SECTIONS
    ]


def changed(config: Config, key: str, value: object) -> Config:
    section, _, name = key.partition(".")
    part = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: part})


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf", "1e39"])
@pytest.mark.parametrize("key", keys_of(float))
def test_every_float_is_finite_in_float32(config: Config, key: str, odd: str) -> None:
    with pytest.raises(ConfigError, match=key):
        validate(changed(config, key, ODD[odd]), dp=1)


@pytest.mark.parametrize("odd", ["10**21", "-10**21"])
@pytest.mark.parametrize("key", keys_of(int))
def test_every_integer_is_of_64_bits(config: Config, key: str, odd: str) -> None:
    with pytest.raises(ConfigError, match=key):
        validate(changed(config, key, ODD[odd]), dp=1)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.kl_coef=-1",
        "optim.weight_decay=-1",
        "optim.beta1=-1",
        "optim.beta1=1",
        "optim.beta2=1.5",
        "optim.eps=0",
        "optim.eps=-1",
        "optim.eps=1e-40",
        "optim.component_lr={transformer: 0}",
        "optim.lr=1e21",
        "rollout.eta=1e21",
        "rollout.true_cfg_scale=1e21",
        "optim.component_lr={transformer: .inf}",
        "reward.color.weight=.nan",
        "rollout.start_timeout_s=1e9",
        "rollout.request_timeout_s=1e9",
        "rollout.height=4112",
        "rollout.width=0",
        "rollout.num_frames=0",
        "rollout.num_inference_steps=1001",
        "rollout.guidance_scale=-1",
        "rollout.sde_window_range=[0, 1000000000000000000000]",
        "eval.num_inference_steps=-1",
        "eval.num_samples=2147483648",
        "run.name=' '",
        "run.name=../elsewhere",
        "seed=10000000000000000000",
    ],
)
def test_a_value_that_no_run_can_use_is_refused(base: str, override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=key):
        validate(load_config([base, override]), dp=1)


@pytest.mark.parametrize("value", ["{}", "{a: 1}", "[]", "[1]", "[[1]]", "3", "null", "abc"])
@pytest.mark.parametrize(
    "key",
    [
        "track",
        "train.components",
        "rollout.sde_window_range",
        "optim.component_lr",
        "optim",
        "reward",
        "reward.color",
        "reward.color.args",
        "reward.color.weight",
        "optim.lr",
        "run.name",
        "seed",
    ],
)
def test_wrong_containers_are_refused_by_name(base: str, key: str, value: str) -> None:
    """Whatever is not refused here is of the schema's kind."""
    try:
        config = load_config([base, f"{key}={value}"])
    except ConfigError as error:
        assert key in str(error)
        return
    if (key, value) == ("reward.color", "null"):
        assert not config.reward  # null removes it
        return
    node: object = config
    for name in key.split("."):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    assert type(node) is not type(None)
    if isinstance(node, list):
        assert not any(isinstance(item, (dict, list)) for item in node)


def test_the_sweep_knows_every_number() -> None:
    numbers = {*keys_of(int), *keys_of(float)}
    assert len(numbers) > 40
    assert numbers <= set(all_keys())
