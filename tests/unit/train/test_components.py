"""What the windows of a run train of two experts: told before step 1, with the range that would
train both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megadiff.cli.train import main
from megadiff.config.schema import Config
from megadiff.models.registry import build_adapter
from megadiff.planner import command as plan_command
from megadiff.train.components import (
    check_components,
    describe_components,
    forwards_per_sample,
    step_samplings,
    window_pairs,
)
from megadiff.train.sampling import sampling_of

# of 10 steps with shift 5 each has 5: sigma 0.833 is below 0.875
HIGH, LOW = "transformer", "transformer_2"


def _config(**rollout: object) -> Config:
    config = Config()
    config.rollout.height = config.rollout.width = 64
    config.rollout.num_inference_steps = 10
    for key, value in rollout.items():
        setattr(config.rollout, key, value)
    return config


@pytest.fixture
def pair(tiny_wan: dict[str, Path]):
    return build_adapter(tiny_wan["t2v_a14b"])


def test_a_window_that_misses_a_component_is_said_with_the_range_that_does_not(pair):
    config = _config(sde_window_range=[0, 5])
    (warning,) = check_components(config, pair, has_steps=True)
    assert "ONLY transformer LEARNS" in warning and "transformer_2, which has steps 5-9" in warning
    assert (
        "set rollout.sde_window_range=[3,7] to train both, or train.components=[transformer] "
        "to mean it" in warning
    )
    proposed = _config(sde_window_range=[3, 7])
    assert check_components(proposed, pair, has_steps=True) == []
    assert window_pairs(proposed, pair) == {HIGH: 3, LOW: 3}
    late = check_components(_config(sde_window_range=[6, 9]), pair, has_steps=True)
    assert "ONLY transformer_2 LEARNS" in late[0] and "sde_window_range=[3,7]" in late[0]


def test_what_is_meant_is_not_warned_of(pair, tiny_model):
    config = _config(sde_window_range=[0, 5])
    config.train.components = [HIGH]
    assert check_components(config, pair, has_steps=True) == []
    assert check_components(_config(sde_window_range=[0, 5]), pair, has_steps=False) == []
    config.train.components = []
    assert check_components(config, build_adapter(tiny_model), has_steps=True) == []


@pytest.mark.parametrize(
    ("components", "rates", "message"),
    [
        (["transformer_3"], {}, "train.components names transformer_3, but .* are transformer, tr"),
        ([], {"low": 1e-5}, "optim.component_lr names low, but"),
        ([], {LOW: 0.0}, "optim.component_lr={'transformer_2': 0.0} is not positive"),
        ([LOW], {}, r"=\[0,5\] reaches none of .*=\['transformer_2'\]; set .*=\[3,7\]"),
    ],
)
def test_refusals(components, rates, message, pair):
    config = _config(sde_window_range=[0, 5])
    config.train.components, config.optim.component_lr = components, rates
    with pytest.raises(ValueError, match=message):
        check_components(config, pair, has_steps=True)


def test_balanced_windows_take_turns(pair, tiny_model):
    config = _config(sde_window_range=[1, 9], component_windows="balanced")
    ranges = [sampling.sde_window_range for sampling in step_samplings(config, pair)]
    assert ranges == [(1, 5), (5, 9)]
    pairs = {
        component: each["pairs"] for component, each in describe_components(config, pair).items()
    }
    assert pairs == {HIGH: 6, LOW: 6}
    assert step_samplings(_config(component_windows="balanced"), build_adapter(tiny_model)) == [
        sampling_of(_config().rollout)
    ]
    narrow = _config(sde_window_range=[0, 6], component_windows="balanced")
    with pytest.raises(
        ValueError,
        match=r"has 1 of transformer_2's steps \(5-9\), a window has rollout.sde_window_size=2",
    ):
        step_samplings(narrow, pair)


def _starts(config: Config, adapter) -> list[int]:
    samplings = step_samplings(config, adapter)
    size = config.rollout.sde_window_size
    assert all(low + size == high for low, high in (one.sde_window_range for one in samplings))
    return [sampling.sde_window_range[0] for sampling in samplings]


def test_a_window_slides_over_its_range_and_begins_anew(pair, tiny_model):
    """MixGRPO's progressive strategy with roll_back, by a formula that is written apart."""
    config = _config(sde_window_range=[0, 9], sde_window_size=4, sde_window_moves=2)
    one_component = build_adapter(tiny_model)
    starts = _starts(config, one_component)
    assert [starts[step % len(starts)] for step in range(26)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0),
        *(0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0),
    ]
    at_random = _config(sde_window_range=[0, 9], sde_window_size=4)
    assert window_pairs(config, pair) == window_pairs(at_random, pair)
    # a range without room, and one window for ever
    assert _starts(_config(sde_window_range=[1, 3], sde_window_moves=5), one_component) == [1] * 5


def test_balanced_windows_slide_each_over_its_own_range(pair):
    config = _config(
        sde_window_range=[1, 9],
        component_windows="balanced",
        sde_window_size=3,
        sde_window_moves=2,
    )
    # steps 1 to 4 are the first component's, 5 to 8 the second's, by turns
    assert _starts(config, pair) == [1, 5, 1, 5, 2, 6, 2, 6]
    uneven = _config(
        sde_window_range=[2, 9],
        component_windows="balanced",
        sde_window_size=3,
        sde_window_moves=1,
    )
    assert _starts(uneven, pair) == [2, 5, 2, 6]


def test_forwards_of_a_sample_count_what_its_group_shares(pair, tiny_model):
    adapter = build_adapter(tiny_model)
    config = _config(sde_window_range=[0, 5])
    config.algorithm.group_size = 16
    assert forwards_per_sample(config, adapter) == 10
    config.rollout.same_noise = True
    # windows begin at 0, 1, 2 and 3: 2.5 steps on average have one forward for 16 samples
    assert forwards_per_sample(config, adapter) == pytest.approx(10 - 2.5 * 15 / 16)
    config.rollout.sde_window_moves = 7
    assert forwards_per_sample(config, adapter) == pytest.approx(10 - 2.5 * 15 / 16)
    balanced = _config(sde_window_range=[1, 9], component_windows="balanced", same_noise=True)
    balanced.algorithm.group_size = 2
    # at 1 to 3 and at 5 to 7
    assert forwards_per_sample(balanced, pair) == pytest.approx(10 - 5 / 2)


def test_dry_run_shows_every_component(tiny_wan, tmp_path, capsys, caplog):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red picture\na blue picture\n")
    arguments = [
        f"model.path={tiny_wan['t2v_a14b']}",
        f"data.prompts={prompts}",
        "run.name=x",
        "train.num_steps=1",
        "train.prompts_per_step=2",
        "algorithm.group_size=2",
        "reward.color.type=color",
        "optim.lr=1e-4",
        "rollout.height=64",
        "rollout.width=64",
        "rollout.num_frames=5",
        "rollout.guidance_scale=3",
        "rollout.guidance_scale_2=2",
    ]
    assert main([*arguments, "--dry-run", "--json"]) == 0
    components = json.loads(capsys.readouterr().out)["components"]
    assert components == {
        HIGH: {"steps": [0, 1, 2, 3, 4], "pairs": 8, "trained": True},
        LOW: {"steps": [5, 6, 7, 8, 9], "pairs": 0, "trained": True},
    }
    assert "ONLY transformer LEARNS" in caplog.text
    assert plan_command.main([*arguments, "--world-size", "2"]) == 0
    shown = capsys.readouterr()
    # a tiny model's are not 0.00 B
    assert re.search(r"2 x \d+\.\d\d [Mk] parameters", shown.out) and "0.00" not in shown.out[:9]
    assert "(no --gpu given: h200 assumed; --gpu h100)" in shown.err
    assert plan_command.main([*arguments, "--world-size", "2", "--gpu", "h100"]) == 0
    assert "assumed" not in capsys.readouterr().err
