"""A model of two experts in both engines: against plain diffusers, against itself under other layouts, and resumed.

In fp32 on gloo processes, several checks a process. Prompt groups have windows of their own, so that ranks have different
numbers of an expert's rows, and in one batch none at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megadiff.diffusion import sde
from megadiff.engines.experts import ExpertsEngine
from megadiff.engines.microbatch import component_rows, loss_inputs, microbatches
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.tiny import TEXT_DIM
from megadiff.types import LogProbs, Sampling, TrainBatch
from megadiff.weights.shards import ShardFolder, write_shards
from tests.distributed.engines import LOSS, build, differing, gradient_shards, whole
from tests.distributed.ranks import run_ranks

HIGH, LOW = "transformer", "transformer_2"
# 45 tokens, an odd number; 3 steps of 6 are the high-noise expert's
SAMPLING = Sampling(height=48, width=80, num_frames=9, num_inference_steps=6, guidance_scale=3.0, guidance_scale_2=2.0)
WINDOWS = {  # of the 4 groups; two ranks have two each
    "apart": (0, 1, 3, 3),  # the first rank has high-noise rows only, the second low-noise rows only
    "mixed": (2, 0, 3, 2),
    "low": (3, 3, 3, 3),
}
LAYOUTS = {  # engine, sizes of the axes on two ranks
    "veomni_dp2": ("veomni", {}),
    "veomni_sp2": ("veomni", {"sp": 2}),
    "megatron_dp2": ("megatron", {}),
    "megatron_sp2": ("megatron", {"sp": 2}),
    "megatron_tp2": ("megatron", {"tp": 2}),
    "megatron_tp2_whole_tokens": ("megatron", {"tp": 2, "sequence_parallel": False}),
}
STEPS, SAVED_STEP, LR = ("mixed", "apart", "low", "mixed"), 2, 1e-3


@pytest.fixture(scope="module")
def model(tiny_wan: dict[str, Path]) -> Path:
    return tiny_wan["t2v_a14b"]


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """windows.safetensors of plain diffusers, each expert in one piece: log_probs, figures and gradient/COMPONENT.NAME."""
    folder, adapter = tmp_path_factory.mktemp("reference"), WanAdapter(model)
    experts = {name: WanTransformer3DModel.from_pretrained(model / name) for name in adapter.components}
    with exact():
        for windows in WINDOWS:
            save_file(_stock(experts, adapter, _batch(adapter, windows)), folder / f"{windows}.safetensors")
    return folder


def _stock(experts: dict[str, WanTransformer3DModel], adapter: WanAdapter, batch: TrainBatch) -> dict[str, Tensor]:
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
            found[name] = found.get(name, torch.zeros(())) + value.detach().float() / batch.denominator
        step = dict(schedule=batch.schedule, eta=batch.sampling.eta)
        mean = sde.step_mean("flow_sde", piece.latents_BLC, velocity_BLC, piece.sigma_B, piece.sigma_next_B, **step)
        log_prob_B = sde.log_prob("flow_sde", piece.prev_sample_BLC, mean, piece.sigma_B, piece.sigma_next_B, **step)
        found["log_probs"][piece.sample_B, piece.step_B] = log_prob_B.detach()
        gradients = {name: p.grad for name, p in experts[component].named_parameters() if p.grad is not None}
        found |= {f"gradient/{component}.{name}": gradient.clone() for name, gradient in gradients.items()}
        found[f"optim/grad_norm/{component}"] = torch.nn.utils.get_total_norm(gradients.values())
    return found


@pytest.fixture(scope="module")
def run(model: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Layout → the folder of what _run_worker leaves."""

    @cache
    def run_once(layout: str) -> Path:
        out = tmp_path_factory.mktemp(layout)
        run_ranks(_run_worker, 2, model, reference, out, layout)
        return out

    return run_once


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_figures_are_those_of_stock_diffusers(layout, run, reference):
    for windows in ("apart", "mixed"):
        expected, found = load_file(reference / f"{windows}.safetensors"), ShardFolder(run(layout) / windows)
        gradients = {name.removeprefix("gradient/") for name in expected if name.startswith("gradient/")}
        assert found.shapes.keys() == gradients
        floor = 1e-4 * max(float(expected[f"gradient/{name}"].abs().max()) for name in gradients)
        for name in gradients:
            gradient = expected[f"gradient/{name}"]
            error = float((whole(found, name) - gradient).abs().max())
            assert error <= 1e-5 * max(float(gradient.abs().max()), floor), name
        norms = [float(expected[f"optim/grad_norm/{component}"]) for component in (HIGH, LOW)]
        assert found.values["optim/grad_norm"] == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-5)
        for name, value in expected.items():
            if not value.ndim:
                assert found.values[name] == pytest.approx(float(value), rel=1e-5), name
        pairs = [found.values[f"train/pairs/{component}"] for component in (HIGH, LOW)]
        assert pairs == [4.0, 8.0]  # of 16, without those of the group that has no weight


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "veomni_dp2"])
def test_every_layout_trains_alike(layout, run):
    expected, found = (json.loads((run(each) / "figures.json").read_text()) for each in ("veomni_dp2", layout))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-7)
    assert [each[f"optim/grad_norm/{HIGH}"] > 0 for each in found] == [True, True, False, True]
    assert all(each[f"optim/lr/{LOW}"] == 2 * each[f"optim/lr/{HIGH}"] == 2 * LR for each in found)


def _run_worker(model: Path, reference: Path, out: Path, layout: str) -> None:
    with exact():
        engine = _engine(model, layout, lr=0.0)
        for windows in ("apart", "mixed"):
            _check_log_probs(engine, load_file(reference / f"{windows}.safetensors")["log_probs"], windows)
            _write_gradients(engine, windows, out / windows)
        _check_idle(_engine(model, layout))
        engine = _engine(model, layout)
        figures = list(_updates(engine, 0, SAVED_STEP))
        engine.save(out / "checkpoint")
        figures += _updates(engine, SAVED_STEP, len(STEPS))
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


def _check_log_probs(engine: ExpertsEngine, expected: Tensor, windows: str) -> None:
    found = engine.log_probs(_mine(engine, windows)).log_probs_NW
    size = 8 // engine.mesh.dp
    mine = expected[engine.mesh.dp_rank * size :][:size]
    torch.testing.assert_close(found, mine, rtol=0, atol=2e-6)


def _write_gradients(engine: ExpertsEngine, windows: str, folder: Path) -> None:
    captured: dict[str, list] = {}
    for component, member in engine.members.items():

        def capture(*_: object, member=member, component=component) -> None:
            captured.update({f"{component}.{name}": each for name, each in gradient_shards(member).items()})

        member.optimizer.register_step_pre_hook(capture)
    figures = engine.update(_mine(engine, windows), LOSS)
    write_shards(folder, captured, rank=engine.mesh.rank, num_files=engine.mesh.world_size, values=figures)


def _check_idle(engine: ExpertsEngine) -> None:
    """What no rank has rows of does not move: no weight, no moment, no step count. What moved is known as changed."""
    assert engine.changed == {HIGH, LOW}
    engine.mark_pushed()
    engine.update(_mine(engine, "mixed"), LOSS)
    assert engine.changed == {HIGH, LOW}
    engine.mark_pushed()
    before = {component: _held(engine, component) for component in engine.members}
    engine.update(_mine(engine, "low"), LOSS)
    after = {component: _held(engine, component) for component in engine.members}
    assert before[HIGH].keys() == after[HIGH].keys() and any("exp_avg" in key for key in after[HIGH])
    assert [key for key, value in before[HIGH].items() if not torch.equal(value, after[HIGH][key])] == []
    assert any(not torch.equal(value, after[LOW][key]) for key, value in before[LOW].items())
    assert engine.changed == {LOW}
    assert [member.num_updates for member in engine.members.values()] == [1, 2]
    sent = {name.partition(".")[0] for bucket in engine.named_weights(1 << 20, engine.changed) for name, _ in bucket}
    assert sent == {LOW}


def _held(engine: ExpertsEngine, component: str) -> dict[str, Tensor]:
    """All that a checkpoint would have of it, and what forward uses."""
    pieces = engine.members[component].shards()
    held = {f"{key}#{place}": each.local.clone() for key, many in pieces.items() for place, each in enumerate(many)}
    return held | {name: t for bucket in engine.named_weights(1 << 20, [component]) for name, t in bucket}


@pytest.mark.parametrize(("writer", "reader"), [("veomni_dp2", "megatron_tp2"), ("megatron_tp2", "veomni_sp2")])
def test_checkpoint_of_the_pair_goes_on_under_another_engine(writer, reader, model, run, tmp_path):
    run_ranks(_resume_worker, 2, model, run(writer) / "checkpoint", tmp_path, reader)
    assert differing(run(writer) / "checkpoint", tmp_path / "again") == []
    assert ShardFolder(tmp_path / "again").values["optimizer_steps"] == {HIGH: 2, LOW: 2}
    uninterrupted = json.loads((run(writer) / "figures.json").read_text())[SAVED_STEP:]
    for found, expected in zip(json.loads((tmp_path / "figures.json").read_text()), uninterrupted, strict=True):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-7)


def _resume_worker(model: Path, checkpoint: Path, out: Path, layout: str) -> None:
    with exact():
        engine = _engine(model, layout)
        engine.load(checkpoint)
        engine.save(out / "again")
        figures = list(_updates(engine, SAVED_STEP, len(STEPS)))
    if engine.mesh.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures))


def test_one_rank_bfloat16_lora_and_chosen_components(model, tmp_path):
    run_ranks(_alone_worker, 1, model, tmp_path)


def _alone_worker(model: Path, out: Path) -> None:
    adapter = WanAdapter(model)
    batch = _batch(adapter, "mixed")
    with exact():
        _check_bfloat16(model, adapter, batch)
        _check_lora(model, batch, out)
        _check_components(model, batch)
        for backend in ("veomni", "megatron"):
            _check_offloaded(model, batch, out, backend)


def _check_offloaded(model: Path, batch: TrainBatch, out: Path, backend: str) -> None:
    """What rests on the host between updates changes nothing, in bfloat16, where masters rest there too."""
    engines = [build(model, {}, backend=backend, dtype="bfloat16", adapter=WanAdapter(model)) for _ in range(2)]
    for member in engines[1].members.values():
        member._can_offload = True  # as on a GPU
    for index, engine in enumerate(engines):
        for windows in ("mixed", "low", "mixed"):
            engine.update(_batch(engine.adapter, windows), LOSS)
        assert all(member._is_offloaded == bool(index) for member in engine.members.values())
        engine.save(out / f"{backend}_{index}")
    assert differing(out / f"{backend}_0", out / f"{backend}_1") == []
    moments = [moment for member in engines[1].members.values() for moment in member._moments().values()]
    assert moments and all(moment.untyped_storage().nbytes() == 0 for moment in moments)
    assert torch.equal(engines[1].log_probs(batch).means_NWLC, engines[0].log_probs(batch).means_NWLC)
    engines[1].load(out / f"{backend}_0")
    figures = [engine.update(batch, LOSS) for engine in engines]
    assert figures[0] == figures[1]


def _check_bfloat16(model: Path, adapter: WanAdapter, batch: TrainBatch) -> None:
    """The engines compute what the stock module in bfloat16 does. A timestep rounded to bfloat16 would be off by up to 4."""
    experts = {name: WanTransformer3DModel.from_pretrained(model / name) for name in adapter.components}
    for parameter in (each for expert in experts.values() for each in expert.parameters()):
        parameter.data = parameter.data.bfloat16()  # and no buffer: rotary tables stay as they are
    with torch.no_grad():
        expected = _stock_log_probs(experts, adapter, batch)
    for backend in ("veomni", "megatron"):
        engine = build(model, {}, backend=backend, dtype="bfloat16", adapter=adapter)
        found = engine.log_probs(batch)
        gap = float((found.means_NWLC - expected.means_NWLC).abs().max())
        assert gap <= 2e-3, f"{backend}: {gap}"
        assert engine.update(batch, LOSS)["optim/grad_norm"] > 0


def _stock_log_probs(experts: dict, adapter: WanAdapter, batch: TrainBatch) -> LogProbs:
    means_NWLC = torch.empty(8, 2, *batch.latents_NSLC.shape[2:])
    step = dict(schedule=batch.schedule, eta=batch.sampling.eta)
    for component, rows_R in component_rows(batch, adapter.component_of).items():
        for piece in microbatches(batch, rows_R, 3, torch.device("cpu")):
            velocity_BLC = adapter.velocity(
                experts[component], piece.latents_BLC, piece.sigma_B, piece.conditioning, batch.sampling,
                component=component,
            )  # fmt: skip
            sigmas = (piece.sigma_B, piece.sigma_next_B)
            means_NWLC[piece.sample_B, piece.step_B] = sde.step_mean(
                "flow_sde", piece.latents_BLC, velocity_BLC, *sigmas, **step
            )
    return LogProbs(log_probs_NW=batch.old_log_probs_NW, means_NWLC=means_NWLC)


def _check_lora(model: Path, batch: TrainBatch, out: Path) -> None:
    """Both experts have adapters, which alone move, and of an idle one they do not."""
    engine = build(model, {}, backend="veomni", lora=(3, 6.0), adapter=WanAdapter(model))
    start = engine.log_probs(batch)
    figures = engine.update(batch, LOSS)
    assert figures[f"optim/grad_norm/{HIGH}"] > 0 and figures[f"optim/grad_norm/{LOW}"] > 0
    engine.update(_batch(engine.adapter, "low"), LOSS)
    names = {name for bucket in engine.named_lora(1 << 20) for name, _ in bucket}
    assert {name.partition(".")[0] for name in names} == {HIGH, LOW}
    assert len(names) == 2 * 2 * len(engine.lora.modules)
    with engine.reference():
        assert torch.equal(engine.log_probs(batch).means_NWLC, start.means_NWLC)
    engine.save(out / "lora")
    saved = ShardFolder(out / "lora")
    assert saved.values["optimizer_steps"] == {HIGH: 1, LOW: 2}
    assert {name for name in saved.shapes if name.startswith("model/")} == {f"model/{name}" for name in names}
    resumed = build(model, {}, backend="veomni", lora=(3, 6.0), adapter=WanAdapter(model))
    resumed.load(out / "lora")
    assert torch.equal(resumed.log_probs(batch).log_probs_NW, engine.log_probs(batch).log_probs_NW)


def _check_components(model: Path, batch: TrainBatch) -> None:
    """train.components leaves the other expert as it is, and the mean is over the trained one's pairs."""
    engine = build(model, {}, backend="megatron", adapter=WanAdapter(model), components=(LOW,))
    before = _held(engine, HIGH)
    figures = engine.update(batch, LOSS)
    assert all(torch.equal(value, before[key]) for key, value in _held(engine, HIGH).items())
    assert engine.members[LOW].num_updates == 1 and f"optim/lr/{HIGH}" not in figures
    alone = build(model, {}, backend="megatron", adapter=WanAdapter(model), balance="equal")
    assert figures[f"optim/grad_norm/{LOW}"] == alone.update(batch, LOSS)[f"optim/grad_norm/{LOW}"]
    with pytest.raises(FloatingPointError, match="the weights were left as they were"):
        alone.update(replace(batch, advantages_N=torch.full((8,), torch.nan)), LOSS)


def _batch(adapter: WanAdapter, windows: str, dp: int = 1, dp_rank: int = 0) -> TrainBatch:
    """This rank's part of 4 groups of 2 samples; the second group has no weight."""
    generator = torch.Generator().manual_seed(5)
    num_tokens, channels = adapter.latents_shape(SAMPLING)
    conditioning = {}
    for prefix, widths in (("", (9, 6, 7, 5)), ("negative_", (3, 3, 3, 3))):
        conditioning[f"{prefix}prompt_embeds"] = torch.randn(4, max(widths), TEXT_DIM, generator=generator)
        conditioning[f"{prefix}prompt_mask"] = torch.arange(max(widths)) < torch.tensor(widths)[:, None]
    groups_N = torch.arange(8) // 2
    mine_N, mine_P = (slice(size // dp * dp_rank, size // dp * (dp_rank + 1)) for size in (8, 4))
    return TrainBatch(
        latents_NSLC=torch.randn(8, 3, num_tokens, channels, generator=generator)[mine_N],
        old_log_probs_NW=torch.full((8, 2), -3.0, dtype=torch.float64)[mine_N],
        window_start_N=torch.tensor(WINDOWS[windows])[groups_N][mine_N],
        advantages_N=torch.randn(8, generator=generator)[mine_N],
        weights_N=torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])[mine_N],
        group_index_N=groups_N[mine_N] - groups_N[mine_N][0],
        conditioning={name: value_P[mine_P] for name, value_P in conditioning.items()},
        schedule=adapter.schedule(SAMPLING),
        sampling=SAMPLING,
        denominator=12.0,
    )


def _mine(engine: ExpertsEngine, windows: str) -> TrainBatch:
    return _batch(engine.adapter, windows, engine.mesh.dp, engine.mesh.dp_rank)


def _updates(engine: ExpertsEngine, first: int, stop: int) -> Iterator[dict[str, float]]:
    for step, windows in enumerate(STEPS[first:stop], start=first):
        batch = _mine(engine, windows)
        yield engine.update(replace(batch, latents_NSLC=batch.latents_NSLC * (1 + 0.05 * step)), LOSS)


def _engine(model: Path, layout: str, *, lr: float = LR) -> ExpertsEngine:
    backend, sizes = LAYOUTS[layout]
    engine = build(model, sizes, backend=backend, lr=lr, microbatch_size=3, adapter=WanAdapter(model))
    engine.config.optim.component_lr = {LOW: 2 * lr}
    return engine


@contextmanager
def exact() -> Iterator[None]:
    """Few text tokens, among which gradients of single ones do not drown, and a kernel that does not depend on the batch's
    size; recomputation included."""
    with patch("megadiff.models.wan22.velocity.TEXT_TOKENS", 17), sdpa_kernel(SDPBackend.MATH):
        yield
