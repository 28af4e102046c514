"""A model of two experts on one rank of both engines: bfloat16, LoRA, members that are not trained,
and that rest on the host.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from megadiff.config.schema import AlgorithmConfig
from megadiff.diffusion import sde
from megadiff.engines.engine import Engine
from megadiff.engines.gathering import local
from megadiff.engines.microbatch import component_rows, microbatches
from megadiff.engines.sharded import NonFiniteError
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.parallel.plan import LORA_B
from megadiff.tensors.shards import ShardFolder
from megadiff.train.log_probs import LogProbs, log_probs
from megadiff.types import TrainBatch
from tests.distributed.engines import LOSS, build, differing
from tests.distributed.ranks import run_ranks
from tests.distributed.two_experts import HIGH, LOW, batch_of, exact, held


def test_one_rank_bfloat16_lora_and_chosen_components(tiny_wan, tmp_path):
    run_ranks(_alone_worker, 1, tiny_wan["t2v_a14b"], tmp_path)


def _alone_worker(model: Path, out: Path) -> None:
    adapter = WanAdapter(model)
    batch = batch_of(adapter, "mixed")
    with exact():
        _check_bfloat16(model, adapter, batch)
        _check_lora(model, batch, out)
        _check_components(model, batch)
        _check_frozen_lora(model, batch)
        for backend in ("veomni", "megatron"):
            _check_frozen(model, batch, out, backend)
            _check_frozen_average(model, batch, out, backend)
            _check_lagging(model, batch, out, backend)
            _check_not_finite(model, adapter, backend)
            _check_offloaded(model, batch, out, backend)


def _check_offloaded(model: Path, batch: TrainBatch, out: Path, backend: str) -> None:
    """What rests on the host between updates changes nothing, in bfloat16, where masters rest there
    too.
    """
    sizes = dict(
        backend=backend,
        dtype="bfloat16",
        adapter=WanAdapter(model),
        average_decay=0.25,
        keep_reference=True,
    )
    engines = [build(model, {}, offload=offload, **sizes) for offload in ("never", "always")]
    for index, engine in enumerate(engines):
        for windows in ("mixed", "low", "mixed"):
            engine.update(batch_of(engine.adapter, windows), LOSS)
        is_away = [not member._on_host.on_device for member in engine.members.values()]
        assert is_away == [bool(index)] * 2
        engine.offload()
        engine.save(out / f"{backend}_{index}")
    assert differing(out / f"{backend}_0", out / f"{backend}_1") == []
    assert _all_moments_rest(engines[1])
    assert torch.equal(
        log_probs(engines[1], batch).means_NWLC, log_probs(engines[0], batch).means_NWLC
    )
    for swapped in ("averaged", "reference"):
        found = []
        for engine in engines:
            with getattr(engine, swapped)():
                assert engine is engines[0] or _all_moments_rest(engine)
                found.append(log_probs(engine, batch).means_NWLC)
        assert _all_moments_rest(engines[1]) and torch.equal(*found)
        assert not torch.equal(found[0], log_probs(engines[0], batch).means_NWLC)
    engines[1].load(out / f"{backend}_0")
    assert _all_moments_rest(engines[1])
    assert torch.equal(
        log_probs(engines[1], batch).means_NWLC, log_probs(engines[0], batch).means_NWLC
    )
    engines[1].save(out / f"{backend}_1_again")
    assert differing(out / f"{backend}_0", out / f"{backend}_1_again") == []
    figures = [engine.update(batch, LOSS) for engine in engines]
    assert figures[0] == figures[1]


def _all_moments_rest(engine: Engine) -> bool:
    moments = [moment for member in engine.members.values() for _, _, moment in member._moments()]
    return bool(moments) and all(moment.untyped_storage().nbytes() == 0 for moment in moments)


def _check_bfloat16(model: Path, adapter: WanAdapter, batch: TrainBatch) -> None:
    """The engines compute what the stock module in bfloat16 does.

    A timestep rounded to bfloat16 would be off by up to 4.
    """
    experts = {
        name: WanTransformer3DModel.from_pretrained(model / name) for name in adapter.components
    }
    for parameter in (each for expert in experts.values() for each in expert.parameters()):
        parameter.data = parameter.data.bfloat16()  # and no buffer: rotary tables stay as they are
    with torch.no_grad():
        expected = _stock_log_probs(experts, adapter, batch)
    for backend in ("veomni", "megatron"):
        engine = build(model, {}, backend=backend, dtype="bfloat16", adapter=adapter)
        found = log_probs(engine, batch)
        gap = float((found.means_NWLC - expected.means_NWLC).abs().max())
        assert gap <= 2e-3, f"{backend}: {gap}"
        assert engine.update(batch, LOSS)["optim/grad_norm"] > 0


def _stock_log_probs(experts: dict, adapter: WanAdapter, batch: TrainBatch) -> LogProbs:
    means_NWLC = torch.empty(8, 2, *batch.latents_NSLC.shape[2:])
    for component, rows_R in component_rows(batch, adapter.component_of).items():
        for piece in microbatches(batch, rows_R, 3, torch.device("cpu")):
            velocity_BLC = adapter.velocity(
                experts[component],
                piece.latents_BLC,
                piece.sigma_B,
                piece.conditioning,
                batch.sampling,
                component=component,
            )
            step = sde.SdeStep(batch.sampling, batch.schedule, piece.sigma_B, piece.sigma_next_B)
            means_NWLC[piece.sample_B, piece.step_B] = sde.step_mean(
                step, piece.latents_BLC, velocity_BLC
            )
    return LogProbs(log_probs_NW=batch.old_log_probs_NW, means_NWLC=means_NWLC)


def _check_lora(model: Path, batch: TrainBatch, out: Path) -> None:
    """Both experts have adapters, which alone move, and of an idle one they do not."""
    engine = build(model, {}, backend="veomni", lora=(3, 6.0), adapter=WanAdapter(model))
    start = log_probs(engine, batch)
    figures = engine.update(batch, LOSS)
    assert figures[f"optim/grad_norm/{HIGH}"] > 0 and figures[f"optim/grad_norm/{LOW}"] > 0
    engine.update(batch_of(engine.adapter, "low"), LOSS)
    names = {name for bucket in engine.named_lora(1 << 20) for name, _ in bucket}
    assert {name.partition(".")[0] for name in names} == {HIGH, LOW}
    assert len(names) == 2 * 2 * len(engine.lora.modules)
    with engine.reference():
        assert torch.equal(log_probs(engine, batch).means_NWLC, start.means_NWLC)
    engine.save(out / "lora")
    saved = ShardFolder(out / "lora")
    assert saved.values["optimizer_steps"] == {HIGH: 1, LOW: 2}
    assert {name for name in saved.shapes if name.startswith("model/")} == {
        f"model/{name}" for name in names
    }
    resumed = build(model, {}, backend="veomni", lora=(3, 6.0), adapter=WanAdapter(model))
    resumed.load(out / "lora")
    assert torch.equal(
        log_probs(resumed, batch).log_probs_NW, log_probs(engine, batch).log_probs_NW
    )


def _check_components(model: Path, batch: TrainBatch) -> None:
    """train.components leaves the other expert as it is, and the mean is over the trained one's
    pairs.
    """
    engine = build(model, {}, backend="megatron", adapter=WanAdapter(model), components=(LOW,))
    before = held(engine, HIGH)
    figures = engine.update(batch, LOSS)
    assert all(torch.equal(value, before[key]) for key, value in held(engine, HIGH).items())
    assert engine.members[LOW].num_updates == 1 and f"optim/lr/{HIGH}" not in figures
    alone = build(model, {}, backend="megatron", adapter=WanAdapter(model), balance="equal")
    assert figures[f"optim/grad_norm/{LOW}"] == alone.update(batch, LOSS)[f"optim/grad_norm/{LOW}"]
    with pytest.raises(FloatingPointError, match="the weights were left as they were"):
        alone.update(replace(batch, advantages_N=torch.full((8,), torch.nan)), LOSS)


def _check_not_finite(model: Path, adapter: WanAdapter, backend: str) -> None:
    """An expert whose gradient is not finite keeps its weights; the other one makes its step, be it
    before or after it.
    """
    sizes = dict(backend=backend, adapter=WanAdapter(model), lr=1e-2)
    batch = batch_of(adapter, "apart")  # the first half's rows are the high-noise expert's
    whole = build(model, {}, **sizes)
    whole.update(batch, LOSS)
    for broken, other, index_N in ((HIGH, LOW, slice(0, 4)), (LOW, HIGH, slice(4, 8))):
        advantages_N = batch.advantages_N.clone()
        advantages_N[index_N] = torch.nan
        engine = build(model, {}, **sizes)
        engine.mark_pushed()
        engine.config.optim.skip_nonfinite = 1
        before = held(engine, broken)
        with pytest.raises(NonFiniteError, match=f"^{broken}: gradient norm is nan"):
            engine.update(replace(batch, advantages_N=advantages_N), LOSS)
        assert engine.changed == {other} and engine.members[broken].num_updates == 0
        for component, expected in ((broken, before), (other, held(whole, other))):
            for name, value in held(engine, component).items():
                assert torch.equal(value, expected[name]), name

    advantages_N = batch.advantages_N.clone()
    advantages_N[:4] = torch.nan
    engine = build(model, {}, **sizes)  # a run that ends at the first such gradient
    engine.mark_pushed()
    with pytest.raises(NonFiniteError, match=f"^{HIGH}: gradient norm is nan"):
        engine.update(replace(batch, advantages_N=advantages_N), LOSS)
    assert not engine.changed


def _check_frozen(model: Path, batch: TrainBatch, out: Path, backend: str) -> None:
    """What is not trained is held in engine.dtype, without masters and moments, computes and is
    sent as it would be, and is in checkpoints, which load whether more or fewer components are
    trained.
    """
    sizes = dict(backend=backend, dtype="bfloat16", adapter=WanAdapter(model))
    engine, whole_engine = build(model, {}, components=(LOW,), **sizes), build(model, {}, **sizes)
    frozen = engine.members[HIGH]
    parameters = list(frozen.transformer.parameters())
    assert {each.dtype for each in (*parameters, *frozen._masters.values())} == {torch.bfloat16}
    assert not any(each.requires_grad for each in parameters) and not frozen.optimizer.state
    storages = {local(each.detach()).untyped_storage().data_ptr() for each in parameters}
    assert {each.untyped_storage().data_ptr() for each in frozen._masters.values()} <= storages
    assert torch.equal(
        log_probs(engine, batch).means_NWLC, log_probs(whole_engine, batch).means_NWLC
    )
    engine.update(batch, LOSS)
    sent = {name: tensor for bucket in engine.named_weights(1 << 20) for name, tensor in bucket}
    source = {
        f"{HIGH}.{name}": tensor
        for name, tensor in load_file(next((model / HIGH).glob("*.safetensors"))).items()
    }
    assert all(
        torch.equal(sent[name], tensor.bfloat16().float()) for name, tensor in source.items()
    )
    engine.save(out / f"{backend}_frozen")
    whole_engine.load(out / f"{backend}_frozen")
    assert torch.equal(
        log_probs(engine, batch).means_NWLC, log_probs(whole_engine, batch).means_NWLC
    )
    whole_engine.update(batch, LOSS)
    whole_engine.save(out / f"{backend}_both")
    engine.load(out / f"{backend}_both")
    assert torch.equal(
        log_probs(engine, batch).means_NWLC, log_probs(whole_engine, batch).means_NWLC
    )


def _check_frozen_average(model: Path, batch: TrainBatch, out: Path, backend: str) -> None:
    """What is trained no more goes on as it was, and not as its average was."""
    sizes = dict(
        backend=backend, dtype="bfloat16", adapter=WanAdapter(model), average_decay=0.25, lr=1e-2
    )
    both, one = build(model, {}, **sizes), build(model, {}, components=(LOW,), **sizes)
    both.update(batch, LOSS)
    both.save(out / f"{backend}_averaged")
    one.load(out / f"{backend}_averaged")
    assert torch.equal(log_probs(one, batch).means_NWLC, log_probs(both, batch).means_NWLC)


def _check_lagging(model: Path, batch: TrainBatch, out: Path, backend: str) -> None:
    """A component that is trained from now on lags behind nothing yet. The policy follows between
    changes of the weights only, so that a rescue saves a whole one.
    """
    algorithm = AlgorithmConfig(name="nft", lagging_decay=0.5)
    sizes = dict(backend=backend, adapter=WanAdapter(model), algorithm=algorithm, lr=1e-2)
    one = build(model, {}, components=(LOW,), **sizes)
    one.update(batch, LOSS)
    one.follow(0.5)
    one.save(out / f"{backend}_lagging")

    both = build(model, {}, **sizes)
    both.load(out / f"{backend}_lagging")
    assert _lags(both) == [LOW] and both.num_updates == 1  # the larger of 0 and 1
    with both.gate.change():
        following = threading.Thread(target=both.follow, args=(0.0,))
        following.start()
        following.join(0.2)
        assert following.is_alive() and _lags(both) == [LOW]
    following.join(10)
    assert not following.is_alive() and _lags(both) == []


def _lags(engine: Engine) -> list[str]:
    """Return the components whose lagging weights are not the trained ones."""
    return [
        component
        for component, member in engine.members.items()
        if any(
            not torch.equal(lagging, local(member._masters[name]))
            for name, lagging in member._lagging.items()
        )
    ]


def _check_frozen_lora(model: Path, batch: TrainBatch) -> None:
    """Adapters of what is not trained stay zero, and have no moments."""
    engine = build(
        model,
        {},
        backend="veomni",
        lora=(3, 6.0),
        adapter=WanAdapter(model),
        components=(LOW,),
        lr=1e-2,
    )
    engine.update(batch, LOSS)
    assert not engine.members[HIGH].optimizer.state and engine.members[LOW].optimizer.state
    sent = {name: tensor for bucket in engine.named_lora(1 << 20) for name, tensor in bucket}
    moved = {
        name.partition(".")[0]
        for name, tensor in sent.items()
        if name.endswith(LORA_B) and tensor.any()
    }
    assert moved == {LOW}
