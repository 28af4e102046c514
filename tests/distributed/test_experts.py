"""A model of two experts in both engines: against plain diffusers, against itself under other
layouts, and resumed.

In fp32 on gloo processes, several checks a process. Prompt groups have windows of their own, so
that ranks have different numbers of an expert's rows, and in one batch none at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.diffusion import sde
from megadiff.engines.engine import Engine
from megadiff.engines.microbatch import component_rows, loss_inputs, microbatches
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.tensors.shards import ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.train.log_probs import log_probs
from megadiff.types import TrainBatch
from tests.distributed.engines import LOSS, build, differing, gradient_shards, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.two_experts import HIGH, LOW, WINDOWS, batch_of, exact, held
from tests.extra import cases

LAYOUTS = {  # engine, sizes of the axes on two ranks
    "veomni_dp2": ("veomni", {}),
    "veomni_sp2": ("veomni", {"sp": 2}),
    "megatron_dp2": ("megatron", {}),
    "megatron_sp2": ("megatron", {"sp": 2}),
    "megatron_tp2": ("megatron", {"tp": 2}),
    "megatron_tp2_whole_tokens": ("megatron", {"tp": 2, "sequence_parallel": False}),
}
OTHERS = [name for name in LAYOUTS if name != "veomni_dp2"]
LIKE_OTHERS = ("megatron_sp2", "megatron_tp2_whole_tokens")
RESUMED = (
    "veomni_dp2",
    "megatron_dp2",
    "megatron_tp2",
)  # each way of sharding, by the layout that wrote it too
STEPS, SAVED_STEP, LR = ("mixed", "apart", "low", "mixed"), 2, 1e-3


@pytest.fixture(scope="module")
def model(tiny_wan: dict[str, Path]) -> Path:
    return tiny_wan["t2v_a14b"]


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """windows.safetensors of plain diffusers, each expert in one piece: log_probs, figures and
    gradient/COMPONENT.NAME.
    """
    folder, adapter = tmp_path_factory.mktemp("reference"), WanAdapter(model)
    experts = {
        name: WanTransformer3DModel.from_pretrained(model / name) for name in adapter.components
    }
    with exact():
        for windows in WINDOWS:
            save_file(
                _stock(experts, adapter, batch_of(adapter, windows)),
                folder / f"{windows}.safetensors",
            )
    return folder


def _stock(
    experts: dict[str, WanTransformer3DModel], adapter: WanAdapter, batch: TrainBatch
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {"log_probs": torch.empty(8, 2, dtype=torch.float64)}
    for component, rows_R in component_rows(batch, adapter.component_of).items():
        experts[component].zero_grad()
        (piece,) = microbatches(batch, rows_R, 1000, torch.device("cpu"))
        velocity_BLC = adapter.velocity(
            experts[component],
            piece.latents_BLC,
            piece.sigma_B,
            piece.conditioning,
            batch.sampling,
            component=component,
        )
        output = LOSS(loss_inputs(batch, piece, velocity_BLC))
        (output.loss_sum / batch.denominator).backward()
        for name, value in output.sums.items():
            found[name] = (
                found.get(name, torch.zeros(())) + value.detach().float() / batch.denominator
            )
        step = sde.SdeStep(batch.sampling, batch.schedule, piece.sigma_B, piece.sigma_next_B)
        mean = sde.step_mean(step, piece.latents_BLC, velocity_BLC)
        log_prob_B = sde.log_prob(step, piece.prev_sample_BLC, mean)
        found["log_probs"][piece.sample_B, piece.step_B] = log_prob_B.detach()
        gradients = {
            name: p.grad for name, p in experts[component].named_parameters() if p.grad is not None
        }
        found |= {
            f"gradient/{component}.{name}": gradient.clone() for name, gradient in gradients.items()
        }
        found[f"optim/grad_norm/{component}"] = torch.nn.utils.get_total_norm(gradients.values())
    return found


@pytest.fixture(scope="module")
def run(
    model: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Layout → the folder of what _run_worker leaves."""

    @cache
    def run_once(layout: str) -> Path:
        out = tmp_path_factory.mktemp(layout)
        run_ranks(_run_worker, 2, model, reference, out, layout)
        return out

    return run_once


@pytest.mark.parametrize("layout", cases(LAYOUTS, extra_ones=LIKE_OTHERS))
def test_gradients_and_figures_are_those_of_stock_diffusers(layout, run, reference):
    for windows in ("apart", "mixed"):
        expected, found = (
            load_file(reference / f"{windows}.safetensors"),
            ShardFolder(run(layout) / windows),
        )
        gradients = {
            name.removeprefix("gradient/") for name in expected if name.startswith("gradient/")
        }
        assert found.shapes.keys() == gradients
        floor = 1e-4 * max(float(expected[f"gradient/{name}"].abs().max()) for name in gradients)
        for name in gradients:
            gradient = expected[f"gradient/{name}"]
            error = float((whole(found, name) - gradient).abs().max())
            assert error <= 1e-5 * max(float(gradient.abs().max()), floor), name
        norms = [float(expected[f"optim/grad_norm/{component}"]) for component in (HIGH, LOW)]
        assert found.values["optim/grad_norm"] == pytest.approx(
            sum(norm**2 for norm in norms) ** 0.5, rel=1e-5
        )
        for name, value in expected.items():
            if not value.ndim:
                assert found.values[name] == pytest.approx(float(value), rel=1e-5), name
        pairs = [found.values[f"train/pairs/{component}"] for component in (HIGH, LOW)]
        assert pairs == [4.0, 8.0]  # of 16, without those of the group that has no weight


@pytest.mark.parametrize("layout", cases(OTHERS, extra_ones=LIKE_OTHERS))
def test_every_layout_trains_alike(layout, run):
    expected, found = (
        json.loads((run(each) / "figures.json").read_text()) for each in ("veomni_dp2", layout)
    )
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-7)
    assert [each[f"optim/grad_norm/{HIGH}"] > 0 for each in found] == [True, True, False, True]
    assert all(each[f"optim/lr/{LOW}"] == 2 * each[f"optim/lr/{HIGH}"] == 2 * LR for each in found)


def _run_worker(model: Path, reference: Path, out: Path, layout: str) -> None:
    with exact():
        engine = _engine(model, layout, lr=0.0)
        for windows in ("apart", "mixed"):
            _check_log_probs(
                engine, load_file(reference / f"{windows}.safetensors")["log_probs"], windows
            )
            _write_gradients(engine, windows, out / windows)
        engine = _engine(model, layout)
        assert engine.changed == {HIGH, LOW}
        engine.mark_pushed()
        figures = list(_updates(engine, 0, SAVED_STEP))
        assert engine.changed == {HIGH, LOW}
        engine.save(out / "checkpoint")
        figures += _idle_update(engine)
        figures += _updates(engine, SAVED_STEP + 1, len(STEPS))
        if layout in RESUMED:
            engine.save(out / "end")
            dist.barrier()
            resumed = _engine(model, layout)
            resumed.load(out / "checkpoint")
            assert list(_updates(resumed, SAVED_STEP, len(STEPS))) == figures[SAVED_STEP:]
            resumed.save(out / "again")
            dist.barrier()
            assert differing(out / "end", out / "again") == []
    if engine.mesh.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures))


def _check_log_probs(engine: Engine, expected: Tensor, windows: str) -> None:
    found = log_probs(engine, _mine(engine, windows)).log_probs_NW
    size = 8 // engine.mesh.dp
    mine = expected[engine.mesh.dp_rank * size :][:size]
    torch.testing.assert_close(found, mine, rtol=0, atol=2e-6)


def _write_gradients(engine: Engine, windows: str, folder: Path) -> None:
    captured: dict[str, list] = {}
    for component, member in engine.members.items():

        def capture(*_: object, member=member, component=component) -> None:
            captured.update(
                {f"{component}.{name}": each for name, each in gradient_shards(member).items()}
            )

        member.optimizer.register_step_pre_hook(capture)
    figures = engine.update(_mine(engine, windows), LOSS)
    Snapshot(
        shards=captured, rank=engine.mesh.rank, num_files=engine.mesh.world_size, values=figures
    ).write(folder)


def _idle_update(engine: Engine) -> list[dict[str, float]]:
    """The update of SAVED_STEP, which has no row of the high-noise expert on any rank.

    What has none does not move: no weight, no moment, no step count. What moved is known as
    changed.
    """
    engine.mark_pushed()
    before = {component: held(engine, component) for component in engine.members}
    figures = list(_updates(engine, SAVED_STEP, SAVED_STEP + 1))
    after = {component: held(engine, component) for component in engine.members}
    assert before[HIGH].keys() == after[HIGH].keys() and any(
        "exp_avg" in key for key in after[HIGH]
    )
    assert [
        key for key, value in before[HIGH].items() if not torch.equal(value, after[HIGH][key])
    ] == []
    assert any(not torch.equal(value, after[LOW][key]) for key, value in before[LOW].items())
    assert engine.changed == {LOW}
    assert [member.num_updates for member in engine.members.values()] == [
        SAVED_STEP,
        SAVED_STEP + 1,
    ]
    sent = {
        name.partition(".")[0]
        for bucket in engine.named_weights(1 << 20, engine.changed)
        for name, _ in bucket
    }
    assert sent == {LOW}
    return figures


@pytest.mark.parametrize(
    ("writer", "reader"), [("veomni_dp2", "megatron_tp2"), ("megatron_tp2", "veomni_sp2")]
)
def test_checkpoint_of_the_pair_goes_on_under_another_engine(writer, reader, model, run, tmp_path):
    run_ranks(_resume_worker, 2, model, run(writer) / "checkpoint", tmp_path, reader)
    assert differing(run(writer) / "checkpoint", tmp_path / "again") == []
    assert ShardFolder(tmp_path / "again").values["optimizer_steps"] == {HIGH: 2, LOW: 2}
    uninterrupted = json.loads((run(writer) / "figures.json").read_text())[SAVED_STEP:]
    for found, expected in zip(
        json.loads((tmp_path / "figures.json").read_text()), uninterrupted, strict=True
    ):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-7)


def _resume_worker(model: Path, checkpoint: Path, out: Path, layout: str) -> None:
    with exact():
        engine = _engine(model, layout)
        engine.load(checkpoint)
        engine.save(out / "again")
        figures = list(_updates(engine, SAVED_STEP, len(STEPS)))
    if engine.mesh.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures))


def _mine(engine: Engine, windows: str) -> TrainBatch:
    return batch_of(engine.adapter, windows, engine.mesh.dp, engine.mesh.dp_rank)


def _updates(engine: Engine, first: int, stop: int) -> Iterator[dict[str, float]]:
    for step, windows in enumerate(STEPS[first:stop], start=first):
        batch = _mine(engine, windows)
        yield engine.update(
            replace(batch, latents_NSLC=batch.latents_NSLC * (1 + 0.05 * step)), LOSS
        )


def _engine(model: Path, layout: str, *, lr: float = LR) -> Engine:
    backend, sizes = LAYOUTS[layout]
    engine = build(
        model, sizes, backend=backend, lr=lr, microbatch_size=3, adapter=WanAdapter(model)
    )
    engine.config.optim.component_lr = {LOW: 2 * lr}
    return engine
