"""Replicas sample with the lagging policy, evaluations with the trained one; both are resumed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from megadiff.sync.sync import WeightSync
from tests.e2e.conftest import GATED
from tests.e2e.test_rescue import rows_of

DECAY = 0.9
KEYS = [
    GATED,  # without stochastic steps, too
    "algorithm.name=nft",
    f"algorithm.lagging_decay={DECAY}",
    f"algorithm.lagging_decay_rate={DECAY}",  # from the first optimizer step on
    "rollout.sde_window_size=0",
    "train.prompts_per_step=2",
    "optim.lr=1e-3",
    "checkpoint.every=2",
    "eval.every=1",
    "eval.num_samples=4",
    "rollout.mode=separate",
]


def record_pushes(path: Path) -> None:
    """Write a line for each push: its version, and how far its weights are from the first one's."""
    push = WeightSync._push
    first: list[torch.Tensor] = []

    def recorded(self: WeightSync, version: int) -> None:
        push(self, version)
        buckets = self.engine.named_weights(1 << 30)
        weights = torch.cat([tensor.flatten() for bucket in buckets for _, tensor in bucket])
        first[:] = first or [weights]
        distance = float((weights - first[0]).double().norm())
        with path.open("a") as file:
            file.write(json.dumps([version, distance]) + "\n")

    WeightSync._push = recorded


def test_replicas_sample_with_the_lagging_policy(trainer, registry, tmp_path):
    (tmp_path / "held_out.txt").write_text("a green wall\na black wall\n")
    keys = [*KEYS, f"rollout.registry={registry}", f"eval.prompts={tmp_path / 'held_out.txt'}"]
    pushes = tmp_path / "pushes.jsonl"
    whole = trainer.run(*keys, prepare=partial(record_pushes, pushes))
    assert whole.code == 0, whole.stderr
    rows = rows_of(whole.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["policy/velocity_moved"] > 0 for row in rows[2:])

    # before the first update both policies are one; then an evaluation's push and a step's
    versions, distances = zip(*map(json.loads, pushes.read_text().splitlines()), strict=True)
    assert versions == (0, 1, 1, 2, 2, 3)
    start, trained, lagging, later, lagging_later, _ = distances
    assert start == 0 < trained < later
    assert lagging == pytest.approx((1 - DECAY) * trained, rel=1e-3)
    assert lagging < lagging_later < 0.2 * later

    checkpoint = whole.folder / "checkpoints" / "step_000002"
    resumed = trainer.run(*keys, f"checkpoint.resume={checkpoint}")
    assert resumed.code == 0, resumed.stderr
    assert rows_of(resumed.folder) == rows
