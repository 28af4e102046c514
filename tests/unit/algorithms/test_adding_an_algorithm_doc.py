"""The example of docs/adding_an_algorithm.md is built, checked against its config, and right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from megadiff.algorithms import OLD, build_algorithm
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.train.check_algorithm import check_algorithm
from megadiff.types import MatchInputs

ROOT = Path(__file__).parents[3]
PULL = 0.5  # beta in the page's yaml


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    page = (ROOT / "docs/adding_an_algorithm.md").read_text()
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, re.DOTALL)
    for name, code in blocks:
        assert len(code.splitlines()) <= 40
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithm", raising=False)
    return load_config([str(ROOT / "configs/quickstart.yaml"), str(tmp_path / "my_algorithm.yaml")])


def rows(**velocities: torch.Tensor) -> MatchInputs:
    """Return a good, a bad and an uncounted row of 2 × 3 latent elements."""
    generator = torch.Generator().manual_seed(0)
    velocity_BLC = torch.randn(3, 2, 3, generator=generator, dtype=torch.float64)
    return MatchInputs(
        velocity_BLC=velocity_BLC.requires_grad_(),
        target_BLC=torch.randn(3, 2, 3, generator=generator, dtype=torch.float64),
        sigma_B=torch.tensor([0.9, 0.5, 0.5], dtype=torch.float64),
        advantage_B=torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64),
        weight_B=torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64),
        velocities=velocities,
    )


def test_a_run_accepts_its_config(config: Config) -> None:
    algorithm = build_algorithm(config.algorithm)
    assert (algorithm.rows, algorithm.needs) == ("levels", {OLD})
    validate(config, dp=1, on_policy=algorithm.on_policy)
    check_algorithm(config, algorithm)


@pytest.mark.parametrize("is_first_update", [True, False])
def test_its_loss_and_gradient(config: Config, is_first_update: bool) -> None:
    loss = build_algorithm(config.algorithm).loss
    old_BLC = rows().velocity_BLC.detach() + 0.25
    inputs = rows() if is_first_update else rows(old=old_BLC)
    output = loss(inputs)
    (gradient_BLC,) = torch.autograd.grad(output.loss_sum, inputs.velocity_BLC)

    velocity_BLC = inputs.velocity_BLC.detach()
    miss_BLC = velocity_BLC - inputs.target_BLC
    moved_BLC = torch.zeros_like(miss_BLC) if is_first_update else velocity_BLC - old_BLC
    # only the first row is good and counts; both of the first two are pulled
    expected_BLC = 2 / 6 * PULL * moved_BLC
    expected_BLC[0] += 2 / 6 * miss_BLC[0]
    expected_BLC[2] = 0
    torch.testing.assert_close(gradient_BLC, expected_BLC, atol=1e-12, rtol=1e-12)

    pulls = PULL * moved_BLC[:2].square().mean(dim=(1, 2)).sum()
    expected_loss = miss_BLC[0].square().mean() + pulls
    assert output.loss_sum.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    assert output.sums["policy/good_ratio"].item() == 1
    assert output.sums["loss/policy"].item() == pytest.approx(expected_loss.item(), rel=1e-12)
