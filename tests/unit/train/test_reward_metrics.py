"""What is logged of a step's rewards."""

from __future__ import annotations

import torch

from megadiff.algorithms.advantage import group_advantages
from megadiff.rewards.score import TOTAL
from megadiff.train.reward_metrics import reward_metrics
from tests.meshes import one_rank_mesh


def test_groups_without_signal_are_those_that_an_update_leaves_out() -> None:
    total_PG = torch.tensor(
        [
            [1000.0, 1000.0001],  # apart by one rounding of float32
            [0.5, 0.5],
            [0.5, 0.5001],
            [1000.0, 1001.0],
        ]
    )
    assert total_PG[0, 0] != total_PG[0, 1]
    metrics = reward_metrics({TOTAL: total_PG}, [{}], one_rank_mesh())
    _, weights_PG = group_advantages(total_PG, kind="group")
    assert weights_PG[:, 0].tolist() == [0, 0, 1, 1]
    assert metrics["reward/zero_std_ratio"] == 0.5
