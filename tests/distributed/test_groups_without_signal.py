"""Groups whose rewards are all equal: the update that leaves them out moves the weights as one that
computes them does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megadiff.algorithms import build_algorithm
from megadiff.engines.engine import Engine
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.tensors.shards import ShardFolder
from megadiff.train import update as update_module
from megadiff.train.selection import groups_to_train
from megadiff.train.update import update
from megadiff.types import Progress, TrainBatch
from tests.distributed.engines import build, forwards, group_of, mine, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.two_experts import HIGH, LOW, batch_of, exact, held

UPDATES, ROWS = 2, 4  # updates of a step; rows of a group: two samples with two window steps
UNEQUAL, EQUAL = [0.3, 1.0], [0.5, 0.5]


@dataclass(frozen=True)
class Case:
    """rewards: of each rank's groups.

    kept: how many of them it computes. microbatch: in rows; a group has 2 in an update.
    """

    rewards: list[list[list[float]]]
    kept: int
    microbatch: int


CASES = {
    "one_rank_has_one": Case([[EQUAL, UNEQUAL], [EQUAL, EQUAL]], kept=1, microbatch=2),
    "one_rank_has_all": Case([[EQUAL, UNEQUAL], [UNEQUAL, UNEQUAL]], kept=2, microbatch=2),
    "none": Case([[EQUAL, EQUAL], [EQUAL, EQUAL]], kept=1, microbatch=2),
    "two_in_a_microbatch": Case([[EQUAL, UNEQUAL, EQUAL, UNEQUAL]], kept=2, microbatch=4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["veomni", "megatron"])
def test_they_change_nothing(name, backend, tiny_model, tmp_path):
    run_ranks(_worker, len(CASES[name].rewards), tiny_model, tmp_path, CASES[name], backend)
    expected, found = (ShardFolder(tmp_path / way) for way in ("every", "kept"))
    assert found.shapes == expected.shapes
    for key in expected.shapes:
        torch.testing.assert_close(
            whole(found, key), whole(expected, key), rtol=1e-5, atol=2e-7, msg=key
        )


def _worker(model: Path, out: Path, case: Case, backend: str) -> None:
    figures = {}
    with exact():
        for way, choose in (("every", _every), ("kept", groups_to_train)):
            engine = build(
                model,
                {},
                backend=backend,
                lr=1.0,
                microbatch_size=case.microbatch,
                keep_reference=True,
            )
            engine.config.algorithm.kl_coef = 0.04
            batch, rewards_PG = mine(engine), torch.tensor(case.rewards[engine.mesh.rank])
            _update(
                engine,
                batch,
                torch.rand(len(rewards_PG), 2, generator=torch.Generator().manual_seed(0)),
            )
            with (
                patch.object(update_module, "groups_to_train", choose),
                forwards(engine) as counted,
            ):
                figures[way] = _update(engine, batch, rewards_PG)
            rows = ROWS * (len(rewards_PG) if way == "every" else case.kept)
            assert sum(counted[True]) == rows
            # the reference's, and the policy's of the second update
            assert sum(counted[False]) == rows + rows // UPDATES
            assert figures[way].pop("groups") == rows / ROWS
            engine.save(out / way)
    assert figures["kept"] == pytest.approx(figures["every"], rel=1e-5, abs=1e-7)
    assert (figures["kept"]["optim/grad_norm"] == 0) == all(
        each == EQUAL for rank in case.rewards for each in rank
    )


def _update(engine: Engine, batch: TrainBatch, rewards_PG: torch.Tensor) -> dict[str, float]:
    engine.config.algorithm.group_size, engine.config.train.updates_per_step = 2, UPDATES
    for member in engine.members.values():
        for group in member.optimizer.param_groups:
            # weights move with their gradients, and not by the sign of one that is rounding
            group["eps"] = 1.0
    groups = [group_of(batch, index, batch.old_log_probs_NW) for index in range(len(rewards_PG))]
    figures, trained = update(
        engine,
        build_algorithm(engine.config.algorithm),
        groups,
        {"total": rewards_PG},
        progress=Progress(recomputes=True),
    )
    # the others that are computed only fill microbatches
    with_signal = [group for group, row in zip(groups, rewards_PG, strict=True) if row.std() > 0]
    assert {id(group) for group in with_signal} <= {id(group) for group in trained}
    return figures | {"groups": len(trained)}


def _every(groups: list[Any], *_: Any, **__: Any) -> list[int]:
    return [*range(len(groups))]


def test_an_expert_without_signal_rests_however_many_of_its_groups_are_computed(tiny_wan, tmp_path):
    run_ranks(_expert_worker, 1, tiny_wan["t2v_a14b"])


def _expert_worker(model: Path) -> None:
    """Its moments would move its weights, and decay would, by an update of zero gradient."""
    for microbatch in (2, 16):  # of the low-noise expert's two groups none is computed, and both
        engine = build(
            model, {}, backend="veomni", adapter=WanAdapter(model), microbatch_size=microbatch
        )
        batch = batch_of(engine.adapter, "apart")
        _update(engine, batch, torch.tensor([UNEQUAL] * 4))
        before = {component: held(engine, component) for component in (HIGH, LOW)}
        _update(engine, batch, torch.tensor([UNEQUAL, UNEQUAL, EQUAL, EQUAL]))
        moved = {
            component: [
                key
                for key, value in held(engine, component).items()
                if not torch.equal(value, kept[key])
            ]
            for component, kept in before.items()
        }
        assert moved[HIGH] and moved[LOW] == []
        assert _update(engine, batch, torch.tensor([EQUAL] * 4))["optim/grad_norm"] == 0
        assert [engine.members[component].num_updates for component in (HIGH, LOW)] == [
            2 * UPDATES,
            UPDATES,
        ]
