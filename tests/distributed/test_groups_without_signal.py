"""Groups whose rewards are all equal: the update that leaves them out moves the weights as one that computes them does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megadiff.algorithms import build_algorithm
from megadiff.train import update as update_module
from megadiff.train.update import groups_to_train, update
from megadiff.weights.shards import ShardFolder
from tests.distributed.engines import build, group_of, mine, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.two_experts import exact

ROWS = 4  # of a group: two samples with two window steps
UNEQUAL, EQUAL = [0.3, 1.0], [0.5, 0.5]
REWARDS = {  # of the two groups of each rank → groups that each computes
    "one_rank": ([[EQUAL, UNEQUAL], [EQUAL, EQUAL]], ([1], [0])),
    "all": ([[EQUAL, UNEQUAL], [UNEQUAL, UNEQUAL]], ([0, 1], [0, 1])),
    "none": ([[EQUAL, EQUAL], [EQUAL, EQUAL]], ([0], [0])),
}


@pytest.mark.parametrize("case", REWARDS)
@pytest.mark.parametrize("backend", ["veomni", "megatron"])
def test_they_change_nothing(case, backend, tiny_model, tmp_path):
    run_ranks(_worker, 2, tiny_model, tmp_path, case, backend)
    expected, found = (ShardFolder(tmp_path / way) for way in ("every", "kept"))
    for key in expected.shapes:
        torch.testing.assert_close(whole(found, key), whole(expected, key), rtol=1e-5, atol=2e-7, msg=key)


def _worker(model: Path, out: Path, case: str, backend: str) -> None:
    rewards, kept = REWARDS[case]
    figures = {}
    with exact():
        for way, choose in (("every", _every), ("kept", groups_to_train)):
            engine = build(model, {}, backend=backend, microbatch_size=ROWS, keep_reference=True)
            engine.config.algorithm.kl_coef, engine.config.algorithm.group_size = 0.04, 2
            batch, computed = mine(engine), []
            groups = [group_of(batch, index, batch.old_log_probs_NW) for index in range(2)]
            with patch.object(update_module, "groups_to_train", _recording(choose, computed)):
                figures[way] = update(
                    engine,
                    build_algorithm(engine.config.algorithm),
                    groups,
                    torch.tensor(rewards[engine.mesh.rank]),
                    config=engine.config,
                    mesh=engine.mesh,
                    recompute=True,
                )
            assert computed == ([0, 1] if way == "every" else kept[engine.mesh.rank])
            engine.save(out / way)
    assert figures["kept"] == pytest.approx(figures["every"], rel=1e-5, abs=1e-7)
    assert (figures["kept"]["optim/grad_norm"] == 0) == (case == "none")


def _recording(choose: Callable[..., list[int]], computed: list[int]) -> Callable[..., list[int]]:
    def chosen(*args: Any, **named: Any) -> list[int]:
        computed.extend(choose(*args, **named))
        return computed

    return chosen


def _every(groups: list[Any], *_: Any, **__: Any) -> list[int]:
    return [*range(len(groups))]


@pytest.mark.parametrize(
    ("weights", "elsewhere", "microbatch", "expected"),
    [
        ([0, 1, 0, 1], 0, 4, [1, 3]),  # a group fills a microbatch
        ([0, 1, 0, 1], 3, 4, [0, 1, 3]),  # as many as on the rank that has most
        ([0, 0, 0, 1], 0, 8, [0, 3]),  # two fill one
        ([0, 1, 1, 1], 0, 8, [0, 1, 2, 3]),
        ([0, 0, 1, 0], 0, 6, [0, 1, 2]),  # three groups fill two microbatches
        ([1, 0, 0, 1], 0, 64, [0, 1, 2, 3]),  # all of them do not fill one
        ([0, 0, 0, 0], 0, 4, [0]),  # an update whose gradient is zero is one still
        ([1, 1, 1, 1], 0, 4, [0, 1, 2, 3]),
    ],
)
def test_microbatches_stay_full_and_equally_many(weights, elsewhere, microbatch, expected, monkeypatch):
    monkeypatch.setattr(
        update_module, "all_reduce_max", lambda values, _: {key: max(value, elsewhere) for key, value in values.items()}
    )
    trajectory = SimpleNamespace(log_probs=torch.zeros(2))
    groups = [SimpleNamespace(trajectories=[trajectory] * 4)] * 4
    config = SimpleNamespace(train=SimpleNamespace(updates_per_step=2, microbatch_size=microbatch))
    mesh = SimpleNamespace(cpu_group=None)
    assert groups_to_train(groups, torch.tensor(weights).float(), config=config, mesh=mesh) == expected
