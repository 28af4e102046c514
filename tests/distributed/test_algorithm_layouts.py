"""One algorithm of each kind of rows is the same under every layout, and goes on after a resume.

Fixed groups take the place of replicas. Two steps of update.update() on one process are compared
with those on two ranks: figures, the gradient of every optimizer step, and the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.tiny_models.wan22 import TEXT_DIM
from megadiff.algorithms import build_algorithm
from megadiff.config.schema import AlgorithmConfig
from megadiff.engines.engine import Engine
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.train.update import update
from megadiff.types import Progress, RolloutGroup
from tests.distributed import two_experts
from tests.distributed.engines import (
    SAMPLING,
    build,
    differing,
    gradient_shards,
    sent_weights,
    whole,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.two_experts import HIGH, LOW, exact
from tests.extra import cases
from tests.scored import noise_group

# a clip range to whose other side no rounding brings a row
SETTINGS = {"group_size": 4, "clip_range": 1.0, "noise_levels": 2}
LAGGING = {"lagging_decay": 0.9, "lagging_decay_rate": 0.25}
# name → the model, the algorithm, updates of a step, LoRA's rank and alpha
CASES = {
    "guard": ("qwen", {"name": "grpo_guard", "kl_coef": 0.1, "trained_steps": 1}, 2, (0, 0.0)),
    "nft": ("qwen", {"name": "nft", **LAGGING}, 2, (0, 0.0)),
    "awm": ("qwen", {"name": "awm", "matching": "huber"}, 2, (0, 0.0)),
    "dpo": ("qwen", {"name": "dpo", "beta": 1.0}, 1, (0, 0.0)),
    "lora_nft": ("qwen", {"name": "nft", **LAGGING, "kl_coef": 0.1}, 1, (3, 6.0)),
    "wan_nft": ("wan", {"name": "nft", **LAGGING}, 1, (0, 0.0)),
    "wan_dpo": ("wan", {"name": "dpo", "beta": 1.0}, 1, (0, 0.0)),
}
LAYOUTS = {
    "one": (1, "veomni", {}),
    "veomni_dp2": (2, "veomni", {}),
    "veomni_sp2": (2, "veomni", {"sp": 2}),
    "megatron_tp2": (2, "megatron", {"tp": 2}),
}
# where the third step is taken by a resumed engine as well
RESUMED = {
    "one": ("nft", "lora_nft"),
    "veomni_dp2": ("wan_nft",),
    "veomni_sp2": (),
    "megatron_tp2": ("nft",),
}
# groups have 4 samples; the second one's are alike
REWARDS_PG = torch.tensor(
    [[0.3, 1.0, -0.2, 0.4], [0.5, 0.5, 0.5, 0.5], [2.0, -0.5, 0.1, 0.2], [0.0, 1.0, 1.0, 0.0]]
)
NUM_STEPS = 2


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_wan: dict[str, Path]) -> dict[str, Path]:
    return {"qwen": tiny_model, "wan": tiny_wan["t2v_a14b"]}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Layout → the folder of what _worker leaves."""

    @cache
    def run_once(layout: str) -> Path:
        out = tmp_path_factory.mktemp(layout)
        first = run_once("one") if layout == "megatron_tp2" else None
        run_ranks(_worker, LAYOUTS[layout][0], models, out, layout, first)
        return out

    return run_once


@pytest.mark.parametrize(
    "layout", cases(("veomni_dp2", "veomni_sp2", "megatron_tp2"), extra_ones=("veomni_sp2",))
)
def test_every_layout_trains_alike(layout: str, run: Callable[[str], Path]) -> None:
    for case in CASES:
        expected = ShardFolder(run("one") / case)
        found = ShardFolder(run(layout) / case)
        for row, other in zip(found.values["steps"], expected.values["steps"], strict=True):
            assert row == pytest.approx(other, rel=1e-4, abs=1e-7), case
        assert found.shapes == expected.shapes
        gradients = {name: whole(expected, name) for name in expected.shapes}
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        assert largest > 1e-4, case
        for name, gradient in gradients.items():
            error = float((whole(found, name) - gradient).abs().max())
            assert error <= 1e-6 * max(largest, 1.0), (case, name, error)


def test_levels_reach_both_components(run: Callable[[str], Path]) -> None:
    for case, num_rows in (("wan_nft", 4 * 4 * 2), ("wan_dpo", 3 * 2 * 2)):
        for row in ShardFolder(run("one") / case).values["steps"]:
            pairs = [row[f"train/pairs/{component}"] for component in (HIGH, LOW)]
            assert min(pairs) > 0 and sum(pairs) == num_rows


@pytest.mark.parametrize("case", RESUMED["one"])
def test_the_lagging_policy_goes_on_under_another_layout(
    case: str, run: Callable[[str], Path]
) -> None:
    """Bit for bit where it was (see _check_resume), and alike on two tensor-parallel ranks."""
    saved = run("one") / f"{case}_saved"
    assert any(name.startswith("lagging/") for name in ShardFolder(saved).shapes)
    assert differing(saved, run("megatron_tp2") / f"{case}_loaded") == []
    found, expected = (
        json.loads((run(layout) / f"{case}_{name}.json").read_text())
        for layout, name in (("megatron_tp2", "loaded"), ("one", "third"))
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


def _worker(models: dict[str, Path], out: Path, layout: str, first: Path | None) -> None:
    with exact():
        for case in CASES:
            engine = _engine(models, case, layout)
            _write_steps(engine, out / case)
            if case in RESUMED[layout]:
                _check_resume(engine, models, case, layout, out)
        for case in RESUMED["one"] if first else ():
            engine = _engine(models, case, layout)
            engine.load(first / f"{case}_saved")
            engine.save(out / f"{case}_loaded")
            _write_figures(engine, out / f"{case}_loaded.json")
    if engine.mesh.world_size > 1:
        dist.barrier()


def _check_resume(
    engine: Engine, models: dict[str, Path], case: str, layout: str, out: Path
) -> None:
    """The third step of an engine that was loaded is that of the engine that was saved."""
    trained = sent_weights(engine)
    with engine.lagging():
        lagging = sent_weights(engine)
    moved = [name for name in trained if not torch.equal(trained[name], lagging[name])]
    assert moved and engine.changed == set(engine.members)

    engine.save(out / f"{case}_saved")
    figures = _write_figures(engine, out / f"{case}_third.json")
    engine.save(out / f"{case}_end")
    resumed = _engine(models, case, layout)
    if engine.mesh.world_size > 1:
        dist.barrier()
    resumed.load(out / f"{case}_saved")
    assert _step(resumed, NUM_STEPS) == figures
    resumed.save(out / f"{case}_again")
    if engine.mesh.world_size > 1:
        dist.barrier()
    assert differing(out / f"{case}_end", out / f"{case}_again") == []


def _write_figures(engine: Engine, path: Path) -> dict[str, float]:
    """Take the step after the last one, and write its figures."""
    figures = _step(engine, NUM_STEPS)
    if engine.mesh.rank == 0:
        path.write_text(json.dumps(figures))
    return figures


def _engine(models: dict[str, Path], case: str, layout: str) -> Engine:
    family, algorithm, num_updates, lora = CASES[case]
    _, backend, sizes = LAYOUTS[layout]
    adapter = {"qwen": QwenImageAdapter, "wan": WanAdapter}[family](models[family])
    engine = build(
        models[family],
        sizes,
        backend=backend,
        adapter=adapter,
        lr=3.0 if lora[0] else 0.1,
        microbatch_size=8,
        lora=lora,
        algorithm=AlgorithmConfig(**SETTINGS | algorithm),
    )
    engine.config.train.updates_per_step = num_updates
    for member in engine.members.values():
        for group in member.optimizer.param_groups:
            # weights move with their gradients, and not by the sign of one that is rounding
            group["eps"] = 1.0
    return engine


def _step(engine: Engine, step: int) -> dict[str, float]:
    """Take a step with this rank's groups."""
    config = engine.config
    algorithm = build_algorithm(config.algorithm)
    num_groups = len(REWARDS_PG) // engine.mesh.dp
    first = engine.mesh.dp_rank * num_groups
    config.rollout.sde_window_size = 2 if algorithm.rows == "steps" else 0
    groups = [
        _group(engine, index, config.rollout.sde_window_size)
        for index in range(first, first + num_groups)
    ]
    rewards = {"total": REWARDS_PG[first : first + num_groups]}
    figures, _ = update(engine, algorithm, groups, rewards, progress=Progress(step=step))
    return figures


def _group(engine: Engine, index: int, num_steps: int) -> RolloutGroup:
    is_wan = isinstance(engine.adapter, WanAdapter)
    return noise_group(
        engine.adapter,
        two_experts.SAMPLING if is_wan else SAMPLING,
        index,
        num_steps=num_steps,
        text_dim=TEXT_DIM if is_wan else 64,
    )


def _write_steps(engine: Engine, folder: Path) -> None:
    """Write each step's figures, and each optimizer step's gradients."""
    captured: dict[str, list[Shard]] = {}
    for component, member in engine.members.items():

        def capture(*_: object, member=member, component=component) -> None:
            for name, shards in gradient_shards(member).items():
                captured[f"{member.num_updates}/{component}.{name}"] = shards

        member.optimizer.register_step_pre_hook(capture)
    figures = [_step(engine, step) for step in range(NUM_STEPS)]
    mesh = engine.mesh
    values = {"steps": figures}
    snapshot = Snapshot(shards=captured, rank=mesh.rank, num_files=mesh.world_size, values=values)
    snapshot.write(folder)
