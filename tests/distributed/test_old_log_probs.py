"""The update with old log_probs of the trainer (algorithm.old_log_prob=recompute), which takes
those of the first part from the forwards that train it, against one that computes all of them
before. On two gloo ranks; of two experts each has rows of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megadiff.algorithms import build_algorithm
from megadiff.algorithms.advantage import group_advantages
from megadiff.engines.engine import Engine
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.parallel.collectives import sum_tensor
from megadiff.tensors.shards import ShardFolder
from megadiff.train.log_probs import log_probs
from megadiff.train.rows import to_train_batch, update_parts, with_velocities
from megadiff.train.update import update, with_denominator
from megadiff.types import Progress, RolloutGroup
from tests.distributed.engines import build, forwards, group_of, mine, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.two_experts import batch_of, exact

ENGINES = {"qwen_veomni": "veomni", "experts_megatron": "megatron"}
LR, GROUP_SIZE = 1.0, 2
NUM_ROWS = 8  # of a rank: two groups of two samples with two window steps
REWARDS_PG = torch.tensor([[0.3, 1.0], [2.0, -0.5]])
# What replicas recorded, above the trainer's: the second window step's importance is truncated
ABOVE_W = torch.tensor([0.4, -2.0])
IMPORTANCE = (torch.exp(-ABOVE_W[0]).item() + 2.0) / 2


@pytest.mark.parametrize("name", ENGINES)
def test_only_later_updates_rows_take_another_forward(name, tiny_model, tiny_wan, tmp_path):
    model = tiny_wan["t2v_a14b"] if name.startswith("experts") else tiny_model
    run_ranks(_worker, 2, model, tmp_path, name)
    for num_updates in (1, 2):
        expected, found = (
            ShardFolder(tmp_path / f"{num_updates}_{way}") for way in ("before", "own")
        )
        assert found.shapes == expected.shapes
        for key in expected.shapes:
            torch.testing.assert_close(
                whole(found, key), whole(expected, key), rtol=1e-5, atol=2e-7, msg=key
            )


def _worker(model: Path, out: Path, name: str) -> None:
    with exact():
        for num_updates in (1, 2):
            figures = {}
            for way in (_update_before, _update_own):
                engine = _engine(model, name, num_updates)
                figures[way] = way(engine, _groups(engine))
                engine.save(out / f"{num_updates}_{way.__name__.removeprefix('_update_')}")
            assert figures[_update_own] == pytest.approx(
                figures[_update_before], rel=1e-5, abs=1e-7
            )
            _check_figures(figures[_update_own], num_updates)
        dist.barrier()


def _engine(model: Path, name: str, num_updates: int) -> Engine:
    adapter = WanAdapter(model) if name.startswith("experts") else QwenImageAdapter(model)
    engine = build(
        model,
        {},
        backend=ENGINES[name],
        adapter=adapter,
        lr=LR,
        microbatch_size=NUM_ROWS,
        keep_reference=True,
    )
    engine.config.algorithm.kl_coef, engine.config.algorithm.clip_range = 0.04, 1e-2
    engine.config.algorithm.group_size, engine.config.train.updates_per_step = (
        GROUP_SIZE,
        num_updates,
    )
    for member in engine.members.values():
        for group in member.optimizer.param_groups:
            # weights move with their gradients, and not by the sign of one that is rounding
            group["eps"] = 1.0
    return engine


def _groups(engine: Engine) -> list[RolloutGroup]:
    """This rank's, as if replicas had recorded log_probs that are ABOVE_W the trainer's."""
    is_pair = len(engine.members) > 1
    batch = batch_of(engine.adapter, "apart", 2, engine.mesh.dp_rank) if is_pair else mine(engine)
    recorded_NW = log_probs(engine, batch).log_probs_NW + ABOVE_W
    return [group_of(batch, index, recorded_NW) for index in range(len(REWARDS_PG))]


def _update_own(engine: Engine, groups: list[RolloutGroup]) -> dict[str, float]:
    config, num_updates = engine.config, engine.config.train.updates_per_step
    with forwards(engine) as counted:
        figures, _ = update(
            engine,
            build_algorithm(config.algorithm),
            groups,
            {"total": REWARDS_PG},
            progress=Progress(recomputes=True),
        )
    # a rank has rows of one expert, and two rows to throw away for each other
    fillers = 2 * (len(engine.members) - 1)
    later = [NUM_ROWS // num_updates + fillers] * (num_updates - 1)
    # the reference's, and the policy's
    assert sum(counted[False]) == sum([NUM_ROWS + fillers, *later])
    return figures


def _update_before(engine: Engine, groups: list[RolloutGroup]) -> dict[str, float]:
    """Old log_probs of all rows from one pass over the batch, in other microbatches than those of
    the updates.
    """
    algorithm, config = build_algorithm(engine.config.algorithm), engine.config
    reduce = dict(all_reduce=lambda value: sum_tensor(value, engine.mesh.dp_group))
    batch = to_train_batch(
        groups, *group_advantages(REWARDS_PG, kind=config.algorithm.advantage, **reduce)
    )
    with engine.reference():
        batch = with_velocities(batch, "reference", engine.velocities(batch))
    old_NW = log_probs(engine, batch).log_probs_NW
    batch = replace(batch, old_log_probs_NW=old_NW, rollout_log_probs_NW=batch.old_log_probs_NW)
    parts = update_parts(batch, num_updates=config.train.updates_per_step)
    stats = [engine.update(with_denominator(part, engine.mesh), algorithm.loss) for part in parts]
    return {key: sum(stat[key] for stat in stats) / len(stats) for key in stats[0]}


def _check_figures(figures: dict[str, float], num_updates: int) -> None:
    assert figures["policy/importance_mean"] == pytest.approx(IMPORTANCE, rel=1e-4)
    if num_updates == 1:
        assert figures["policy/ratio_mean"] == pytest.approx(1, abs=1e-12)
        assert figures["policy/kl_old"] == figures["policy/clip_fraction"] == 0
    else:
        assert figures["policy/kl_old"] > 1e-8
