"""The key algorithm.advantage chooses between the rewards' sum and each of them."""

from __future__ import annotations

import pytest
import torch

from megadiff.algorithms.advantage import gdpo_advantages, group_advantages
from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import Config
from megadiff.rewards.score import TOTAL
from megadiff.train.update import step_advantages
from tests.meshes import one_rank_mesh

WEIGHTS = {"small": 1.0, "large": 2.0, "watched": 0.0}


@pytest.mark.parametrize("kind", ["global", "group", "none", "gdpo"])
def test_step_advantages(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    spreads = {"small": 0.01, "large": 1.0, "watched": 100.0}
    rewards = {
        name: spread * torch.randn(4, 8, generator=generator) for name, spread in spreads.items()
    }
    total = rewards["small"] + 2 * rewards["large"]

    config = Config()
    config.algorithm.advantage = kind
    config.reward = {
        name: RewardConfig(type="color", weight=weight) for name, weight in WEIGHTS.items()
    }
    ours, weights = step_advantages({**rewards, TOTAL: total}, config=config, mesh=one_rank_mesh())

    if kind == "gdpo":
        expected, _ = gdpo_advantages(rewards, {"small": 1.0, "large": 2.0})
    else:
        expected, _ = group_advantages(total, kind=kind)
    assert torch.equal(ours, expected) and weights.tolist() == [[1.0] * 8] * 4
    # where rewards are summed, the small one is not heard
    heard = torch.corrcoef(torch.stack([ours.flatten(), rewards["small"].flatten()]))[0, 1]
    assert (heard > 0.3) == (kind == "gdpo")
