"""Losses and gradients of all algorithms against float64 values that no code here has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megadiff.algorithms import build_algorithm
from megadiff.algorithms.advantage import group_advantages
from megadiff.config.schema import AlgorithmConfig
from megadiff.types import LossOutput, MatchInputs, Sampling, StepInputs

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
INPUTS = GOLDEN["inputs"]
BOUND = 1e-9
# names in the file → keys of the config
KEYS = {
    "clip_range": "clip_range",
    "adv_clip_max": "adv_clip_max",
    "kl_mask_threshold": "kl_limit",
    "kl_coef": "kl_coef",
    "velocity_kl_coef": "kl_coef",
    "beta": "beta",
    "tau": "beta",
    "weighting": "matching",
}
STEP_CASES = [name for name in GOLDEN["cases"] if name.startswith(("flow_", "grpo_"))]
MATCH_CASES = [name for name in GOLDEN["cases"] if name not in STEP_CASES]


def double(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def settings(case: str) -> AlgorithmConfig:
    name = case.partition("/")[0]
    params = GOLDEN["cases"][case]["params"]
    config = AlgorithmConfig(name=name.removesuffix("_kl"))
    for param, value in params.items():
        if param in KEYS:
            setattr(config, KEYS[param], value)
    if name.startswith("flow_grpo"):
        config.name = "flow_grpo"
    if "level_range" in params:
        config.step_weight = "level"
    return config


def step_inputs(params: dict[str, Any], **changes: Any) -> StepInputs:
    kind = params["sde_type"]
    sampling = Sampling(
        height=16,
        width=16,
        num_inference_steps=10,
        sde_type=kind,
        eta=params["eta"],
        sde_window_range=tuple(params.get("level_range", (0, 5))),
    )
    rollout = double(INPUTS["rollout_log_prob"][kind]) if "importance_cap" in params else None
    fields: dict[str, Any] = {
        "latents_BLC": double(INPUTS["latents"]),
        "prev_sample_BLC": double(INPUTS["prev_sample"][kind]),
        "velocity_BLC": double(INPUTS["velocity"]).requires_grad_(),
        "sigma_B": double(INPUTS["sigma"]),
        "sigma_next_B": double(INPUTS["sigma_next"]),
        "old_log_prob_B": None,
        "advantage_B": double(INPUTS["advantage"]),
        "weight_B": double(INPUTS["weight"]),
        "schedule": double(INPUTS["schedule"]),
        "sampling": sampling,
        "rollout_log_prob_B": rollout,
        "velocities": {
            "old": double(INPUTS["velocity_old"]),
            "reference": double(INPUTS["velocity_ref"]),
        },
    }
    return StepInputs(**fields | changes)


def match_inputs(**changes: Any) -> MatchInputs:
    fields: dict[str, Any] = {
        "velocity_BLC": double(INPUTS["velocity"]).requires_grad_(),
        "target_BLC": double(INPUTS["noise"]) - double(INPUTS["clean"]),
        "sigma_B": double(INPUTS["sigma_forward"]),
        "advantage_B": double(INPUTS["advantage"]),
        "weight_B": double(INPUTS["weight"]),
        "velocities": {
            "old": double(INPUTS["velocity_old"]),
            "reference": double(INPUTS["velocity_ref"]),
        },
    }
    return MatchInputs(**fields | changes)


def gradient(output: LossOutput, velocity_BLC: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(output.loss_sum, velocity_BLC)
    return found


@pytest.mark.parametrize("gives_log_probs", [False, True])
@pytest.mark.parametrize("case", STEP_CASES)
def test_losses_over_steps(case: str, gives_log_probs: bool) -> None:
    golden = GOLDEN["cases"][case]
    inputs = step_inputs(golden["params"])
    if gives_log_probs:  # as the first of several updates has them
        old_B = double(INPUTS["old_log_prob"][golden["params"]["sde_type"]])
        velocities = inputs.velocities
        if case.startswith("flow_grpo"):
            velocities = {"reference": velocities["reference"]}
        inputs = step_inputs(golden["params"], old_log_prob_B=old_B, velocities=velocities)
    check(build_algorithm(settings(case)).loss(inputs), inputs.velocity_BLC, golden)


@pytest.mark.parametrize("case", MATCH_CASES)
def test_losses_over_noised_samples(case: str) -> None:
    golden = GOLDEN["cases"][case]
    inputs = match_inputs()
    scale = 1
    if case == "dpo":
        # a pair shares its chosen row's noise, and both of its rows have its loss
        noise_BLC = double(INPUTS["noise"])[0::2].repeat_interleave(2, 0)
        target_BLC = noise_BLC - double(INPUTS["clean"])
        inputs = match_inputs(target_BLC=target_BLC, weight_B=double([1.0] * 8))
        scale = 2
    output = build_algorithm(settings(case)).loss(inputs)
    check(output, inputs.velocity_BLC, golden, scale=scale)


def check(output: LossOutput, velocity_BLC: Tensor, golden: dict, *, scale: int = 1) -> None:
    assert output.loss_sum.item() / scale == pytest.approx(golden["loss_sum"], abs=BOUND, rel=BOUND)
    found = gradient(output, velocity_BLC) / scale
    torch.testing.assert_close(found, double(golden["grad"]), atol=BOUND, rtol=BOUND)
    if "clip_range" in golden["params"]:
        is_clipped_B = (double(golden["ratio"]) - 1).abs() > golden["params"]["clip_range"]
        num_clipped = (is_clipped_B * double(INPUTS["weight"])).sum()
        assert output.sums["policy/clip_fraction"] == num_clipped


@pytest.mark.parametrize("kind", ["group", "global", "none"])
def test_advantages(kind: str) -> None:
    advantages_PG, _ = group_advantages(double(INPUTS["rewards"]), kind=kind)
    expected = double(GOLDEN["advantages"][kind]).float()
    torch.testing.assert_close(advantages_PG, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_on_policy_nft_is_advantage_weighted_matching(beta: float) -> None:
    config = AlgorithmConfig(name="nft", beta=beta)
    inputs = match_inputs(velocities={})
    found = gradient(build_algorithm(config).loss(inputs), inputs.velocity_BLC)

    miss_BLC = inputs.sigma_B[:, None, None] * (inputs.velocity_BLC - inputs.target_BLC)
    magnitude_B = miss_BLC.detach().abs().mean(dim=(1, 2))
    advantage_B = inputs.advantage_B.clamp(-5, 5) * inputs.weight_B
    matching = (advantage_B * miss_BLC.square().mean(dim=(1, 2)) / magnitude_B).sum()
    (expected,) = torch.autograd.grad(matching, inputs.velocity_BLC)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_the_first_update_of_flow_dppo_is_flow_grpos() -> None:
    gradients = []
    for name in ("flow_dppo", "flow_grpo"):
        inputs = step_inputs({"sde_type": "flow_sde", "eta": 0.75}, velocities={})
        output = build_algorithm(AlgorithmConfig(name=name)).loss(inputs)
        gradients.append(gradient(output, inputs.velocity_BLC))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde"])
def test_guards_log_ratio_is_the_mean_of_noise_times_the_mean_that_moved(kind: str) -> None:
    """The paper's formula, whose terms nearly cancel, has the same value."""
    case = f"grpo_guard/{kind}"
    config = settings(case)
    config.clip_range = 100.0
    inputs = step_inputs(GOLDEN["cases"][case]["params"], weight_B=double([1.0] * 8))
    ratio_mean = build_algorithm(config).loss(inputs).sums["policy/ratio_mean"]
    assert ratio_mean.item() == pytest.approx(sum(GOLDEN["cases"][case]["ratio"]), rel=1e-12)
