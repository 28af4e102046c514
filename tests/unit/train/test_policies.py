"""Which policies an update asks for velocities, and how fast the lagging one follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megadiff.algorithms import build_algorithm
from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.engines.microbatch import Batch
from megadiff.train.policies import follow, lagging_decay, with_old_policy, with_other_policies
from megadiff.train.rows import level_rows, to_train_batch, update_parts
from tests.scored import STEPS, scored_groups

# DiffusionNFT's decay types 1 and 2 after so many optimizer steps
# (lagging_decay_start, _rate, lagging_decay, optimizer steps → decay)
GOLDEN = [
    (0, 0.001, 0.5, {0: 0.0, 1: 0.001, 10: 0.01, 499: 0.499, 500: 0.5, 2000: 0.5}),
    (75, 0.0075, 0.999, {0: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 200: 0.9375, 1000: 0.999}),
]


@pytest.mark.parametrize("start, rate, most, decays", GOLDEN)
def test_decay_of_the_lagging_policy(
    start: int, rate: float, most: float, decays: dict[int, float]
) -> None:
    settings = AlgorithmConfig(
        lagging_decay_start=start, lagging_decay_rate=rate, lagging_decay=most
    )
    reached = {count: lagging_decay(settings, num_updates=count) for count in decays}
    assert reached == pytest.approx(decays, abs=1e-12)


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_the_decay_goes_by_updates_that_were_made(updates_per_step: int) -> None:
    """A resumed run may make another number of updates in a step than those before it."""
    config = Config()
    config.algorithm = AlgorithmConfig(
        lagging_decay_start=75, lagging_decay_rate=0.0075, lagging_decay=0.999
    )
    config.train.updates_per_step = updates_per_step
    decays: list[float] = []
    follow(SimpleNamespace(config=config, num_updates=200, follow=decays.append))
    assert decays == pytest.approx([0.9375])


class Policies:
    """Stand in for an engine: a velocity says whose it is."""

    def __init__(self) -> None:
        self.current = 1.0
        self.asked: list[tuple[float, int]] = []

    def velocities(self, batch: Batch) -> Tensor:
        self.asked.append((self.current, batch.num_rows))
        return torch.full((batch.num_rows, 3, 1), self.current)

    @contextmanager
    def _as(self, value: float) -> Iterator[None]:
        before = self.current
        self.current = value
        yield
        self.current = before

    def reference(self):
        return self._as(2.0)

    def lagging(self):
        return self._as(3.0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"name": "nft"}, {}),  # the old policy is asked later, and not for the first update
        ({"name": "nft", "lagging_decay": 0.5}, {"lagging": 3.0}),
        ({"name": "nft", "kl_coef": 0.1}, {"reference": 2.0}),
        ({"name": "awm", "lagging_decay": 0.3, "lagging_kl_coef": 1.0}, {"lagging": 3.0}),
        ({"name": "dpo"}, {"reference": 2.0}),
        ({"name": "rwr"}, {}),
    ],
)
def test_only_policies_that_a_loss_needs_are_asked(changes: dict, expected: dict) -> None:
    config = Config()
    config.algorithm = AlgorithmConfig(**changes)
    algorithm = build_algorithm(config.algorithm)
    engine = Policies()
    drawn = level_rows(scored_groups([0, 1]), config, algorithm)
    batch = with_other_policies(engine, algorithm, drawn)
    assert {name: float(v.mean()) for name, v in batch.velocities_NLC.items()} == expected
    assert [policy for policy, _ in engine.asked] == list(expected.values())
    assert engine.current == 1.0


@pytest.mark.parametrize("weighs", [False, True])
def test_the_old_policy_is_asked_for_all_updates_but_the_first(weighs: bool) -> None:
    scored = scored_groups([0, 1], num_steps=STEPS)
    batch = to_train_batch(scored.groups, scored.advantages_PG, scored.weights_PG)
    parts = update_parts(batch, num_updates=2)
    engine = Policies()
    first, second = with_old_policy(engine, parts, weighs=weighs)
    assert engine.asked == [(1.0, 8)]
    assert not first.velocities_NKLC
    assert second.velocities_NKLC["old"].shape == (4, STEPS, 3, 1)
    for part, before in zip((first, second), parts, strict=True):
        assert part.old_log_probs_NW is None
        if weighs:
            assert torch.equal(part.rollout_log_probs_NW, before.old_log_probs_NW)
        else:
            assert part.rollout_log_probs_NW is None


def test_velocities_are_the_rows_own() -> None:
    """A row of a batch is (sample, trained step), and so is its velocity."""
    scored = scored_groups([0, 1], num_steps=STEPS)
    batch = to_train_batch(scored.groups, scored.advantages_PG, scored.weights_PG)
    batch = replace(batch, trained_steps_NK=batch.trained_steps_NK[:, 1:])

    class Rows(Policies):
        def velocities(self, batch: Batch) -> Tensor:
            return torch.arange(float(batch.num_rows))[:, None, None].expand(-1, 3, 1)

    config = AlgorithmConfig(name="flow_grpo", kl_coef=0.1)
    found = with_other_policies(Rows(), build_algorithm(config), batch)
    assert found.velocities_NKLC["reference"][:, 0, 0, 0].tolist() == list(range(8))
