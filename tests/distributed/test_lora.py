"""LoRA in both engines against peft on plain diffusers, against itself under other layouts, and
across engines.

In fp32 on gloo processes, several checks a process: starting one takes longer than most of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from megadiff.engines.engine import Engine
from megadiff.engines.lora import lora_values
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.qwen_image.plan import PLAN
from megadiff.parallel.lora import lora_shapes, start_values
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.train.log_probs import log_probs
from megadiff.types import LoraSpec
from tests.distributed.engines import (
    LOSS,
    at_step,
    build,
    differing,
    mine,
    only,
    stock_backward,
    stock_transformer,
    train_batch,
    updates,
    whole,
    write_gradients,
)
from tests.distributed.lora_layouts import ALPHA, LAYOUTS, LR, RANK, lora_engine, named_tensors
from tests.distributed.ranks import run_ranks
from tests.extra import cases

LIKE_OTHERS = ("megatron_tp2_whole_tokens", "megatron_tp2_sp2")
STEPS, SAVED_STEP, WEIGHT_DECAY, MAX_NORM = 4, 2, 1e-1, 0.05


@pytest.fixture(scope="module")
def start(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one file whose B are not zero, so that every gradient counts from the first
    step on.
    """
    folder, (spec, shapes) = tmp_path_factory.mktemp("start"), _lora(tiny_model)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    shards = {
        f"model/transformer.{name}": [
            Shard(local=tensor, offsets=(0, 0), shape=tuple(tensor.shape))
        ]
        for name, tensor in tensors.items()
    }
    values = {"optimizer_steps": {}, "lora": lora_values(spec)}
    Snapshot(shards=shards, rank=0, num_files=1, values=values).write(folder)
    return folder


@pytest.fixture(scope="module")
def peft_run(tiny_model: Path, start: Path) -> dict[str, Tensor]:
    """gradient/SCALE/name, norm/STEP and weight/name of real peft on plain diffusers, in one
    process and one piece.
    """
    adapter, transformer = QwenImageAdapter(tiny_model), _with_peft(tiny_model, ShardFolder(start))
    trained = {
        name.replace(".default", ""): p
        for name, p in transformer.named_parameters()
        if p.requires_grad
    }
    found: dict[str, Tensor] = {}
    for scale in (1.0, 4.0):
        stock_backward(transformer, adapter, train_batch(adapter, scale))
        found |= {f"gradient/{scale}/{name}": p.grad for name, p in trained.items()}
        found[f"norm/{scale}"] = torch.nn.utils.get_total_norm(p.grad for p in trained.values())
        transformer.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        stock_backward(transformer, adapter, at_step(train_batch(adapter), step))
        found[f"norm/step{step}"] = torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found | {f"weight/{name}": p.detach() for name, p in trained.items()}


def _with_peft(tiny_model: Path, start: ShardFolder) -> nn.Module:
    spec, shapes = _lora(tiny_model)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(spec.modules))
    transformer = inject_adapter_in_model(config, stock_transformer(tiny_model)).train()
    parameters = {
        name.replace(".default", ""): p
        for name, p in transformer.named_parameters()
        if p.requires_grad
    }
    assert parameters.keys() == shapes.keys(), "peft wraps other modules, or names them otherwise"
    for name, parameter in parameters.items():
        parameter.data.copy_(whole(start, f"model/transformer.{name}"))
    return transformer


def _lora(tiny_model: Path) -> tuple[LoraSpec, dict[str, tuple[int, int]]]:
    base = {
        name: tuple(p.shape)
        for name, p in QwenImageAdapter(tiny_model).empty_transformer().named_parameters()
    }
    spec = LoraSpec(rank=RANK, alpha=ALPHA, modules=PLAN.lora_modules(base))
    return spec, lora_shapes(spec, base)


@pytest.fixture(scope="module")
def run(
    tiny_model: Path, start: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Layout → the folder of a run of STEPS updates from `start`, with a checkpoint at
    SAVED_STEP.
    """

    @cache
    def run_once(layout: str) -> Path:
        _, world_size, _, _ = LAYOUTS[layout]
        out = tmp_path_factory.mktemp(layout)
        run_ranks(_run_worker, world_size, tiny_model, start, out, layout)
        return out

    return run_once


@pytest.mark.parametrize("layout", cases(LAYOUTS, extra_ones=LIKE_OTHERS))
def test_gradients_norms_and_weights_are_those_of_peft(layout, tiny_model, start, run, peft_run):
    _, shapes = _lora(tiny_model)
    for scale in (1.0, 4.0):
        found = ShardFolder(run(layout) / f"gradients_{scale}")
        assert found.shapes == shapes
        for name in shapes:
            expected = peft_run[f"gradient/{scale}/{name}"]
            tolerance = 1e-5 * float(expected.abs().max()) + 1e-12
            torch.testing.assert_close(
                whole(found, name), expected, rtol=1e-5, atol=tolerance, msg=name
            )
        assert found.values["optim/grad_norm"] == pytest.approx(
            float(peft_run[f"norm/{scale}"]), rel=1e-5
        )
    norms = [
        each["optim/grad_norm"] for each in json.loads((run(layout) / "figures.json").read_text())
    ]
    assert norms == pytest.approx(
        [float(peft_run[f"norm/step{step}"]) for step in range(STEPS)], rel=1e-4
    )
    assert min(norms) < MAX_NORM < max(norms), "the clipping must act, but not always"
    end, begin = ShardFolder(run(layout) / "end"), ShardFolder(start)
    assert {name for name in end.shapes if name.startswith("model/")} == begin.shapes.keys()
    for name in shapes:
        expected = peft_run[f"weight/{name}"]
        torch.testing.assert_close(
            whole(end, f"model/transformer.{name}"), expected, rtol=1e-3, atol=1e-4, msg=name
        )
    moved = [not torch.equal(whole(begin, name), whole(end, name)) for name in begin.shapes]
    assert all(moved)


def _run_worker(tiny_model: Path, start: Path, out: Path, layout: str) -> None:
    engine = lora_engine(tiny_model, layout, lr=0.0)
    _check_start(engine, tiny_model)
    engine.load(start)
    for scale in (1.0, 4.0):
        write_gradients(engine, mine(engine, scale), out / f"gradients_{scale}")
    engine = _trainer(tiny_model, layout)
    engine.load(start)
    figures = list(updates(engine, 0, SAVED_STEP))
    engine.save(out / "checkpoint")
    figures += updates(engine, SAVED_STEP, STEPS)
    engine.save(out / "end")
    dist.barrier()
    _check_end(engine, tiny_model, ShardFolder(out / "end"), layout)
    if engine.mesh.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures))


def _check_start(engine: Engine, tiny_model: Path) -> None:
    """A is what every layout draws, B is 0, and so the adapter changes nothing yet: not one bit."""
    spec, shapes = _lora(tiny_model)
    assert engine.lora == spec
    for name, tensor in named_tensors(engine.named_lora(10_000)).items():
        name = name.removeprefix("transformer.")
        assert torch.equal(tensor, start_values(name, shapes[name], seed=0)), name
    policy = log_probs(engine, mine(engine))
    with engine.reference():
        reference = log_probs(engine, mine(engine))
    assert torch.equal(policy.means_NWLC, reference.means_NWLC)


def _check_end(engine: Engine, tiny_model: Path, end: ShardFolder, layout: str) -> None:
    """Everything is where it belongs: LoRA tensors whole on every rank, the base as it was and
    equal to the reference.
    """
    shapes, source = (
        _lora(tiny_model)[1],
        load_file(tiny_model / "transformer" / "diffusion_pytorch_model.safetensors"),
    )
    list(engine.named_lora(5_000))  # after which the weights in use are the last update's
    with CommDebugMode() as collectives:
        buckets = list(engine.named_lora(5_000))
    assert (
        collectives.get_total_counts() <= len(buckets) < len(shapes) / 2
    )  # of many tensors at once
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 5_000 for bucket in buckets)
    lora = named_tensors(iter(buckets))
    assert list(lora) == [f"transformer.{name}" for name in shapes]
    assert all(torch.equal(tensor, whole(end, f"model/{name}")) for name, tensor in lora.items())
    for tensor in lora.values():
        tensor.zero_()  # the receiver's own
    base = named_tensors(engine.named_weights(100_000))
    assert base.keys() == {f"transformer.{name}" for name in source}
    assert all(torch.equal(base[f"transformer.{name}"], tensor) for name, tensor in source.items())

    assert only(engine).optimizer.state.keys() == set(only(engine)._optimized.values())
    policy = log_probs(engine, mine(engine))
    with engine.reference():
        reference = log_probs(engine, mine(engine))
    assert torch.equal(log_probs(engine, mine(engine)).log_probs_NW, policy.log_probs_NW)
    backend, _, sizes, _ = LAYOUTS[layout]
    size = engine.config.train.microbatch_size
    plain = log_probs(build(tiny_model, sizes, backend=backend, microbatch_size=size), mine(engine))
    assert torch.equal(reference.means_NWLC, plain.means_NWLC)
    assert (policy.log_probs_NW - plain.log_probs_NW).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("veomni_dp2", "veomni_dp2"),
        ("veomni_dp2_sharded", "veomni_sp2"),
        ("megatron_tp2_dp2", "megatron_tp2_dp2"),
        ("veomni_dp2", "megatron_tp2"),
        ("megatron_tp2_dp2", "veomni_sp2"),
        ("megatron_tp2", "megatron_tp4"),
    ],
)
def test_checkpoint_goes_on_under_another_engine_or_layout(
    writer, reader, tiny_model, run, tmp_path
):
    _, world_size, _, _ = LAYOUTS[reader]
    run_ranks(_resume_worker, world_size, tiny_model, run(writer) / "checkpoint", tmp_path, reader)
    assert differing(run(writer) / "checkpoint", tmp_path / "again") == []
    uninterrupted = json.loads((run(writer) / "figures.json").read_text())[SAVED_STEP:]
    resumed = json.loads((tmp_path / "figures.json").read_text())
    for found, expected in zip(resumed, uninterrupted, strict=True):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-4 * 1e-3)
    if writer == reader:
        assert resumed == uninterrupted
        assert differing(run(writer) / "end", tmp_path / "end") == []


@pytest.mark.parametrize("layout", ["veomni_dp1", "veomni_dp2", "veomni_sp2"])
def test_a_shared_base_changes_no_bit(layout, run):
    """Weights, moments and figures after all updates are those of a base that FSDP2 shards."""
    shared = run(layout)
    sharded = run(f"{layout}_sharded")
    assert differing(shared / "end", sharded / "end") == []
    figures = [json.loads((out / "figures.json").read_text()) for out in (shared, sharded)]
    assert figures[0] == figures[1]


def _resume_worker(tiny_model: Path, checkpoint: Path, out: Path, layout: str) -> None:
    engine = _trainer(tiny_model, layout)
    engine.load(checkpoint)
    engine.save(out / "again")
    figures = list(updates(engine, SAVED_STEP, STEPS))
    engine.save(out / "end")
    if engine.mesh.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures))


def test_a_checkpoint_holds_the_adapter_alone(run, tiny_model):
    folder = ShardFolder(run("megatron_tp2_dp2") / "checkpoint")
    spec, shapes = _lora(tiny_model)
    kinds = ("model", "optim/exp_avg", "optim/exp_avg_sq")
    assert folder.shapes == {
        f"{kind}/transformer.{name}": shape for kind in kinds for name, shape in shapes.items()
    }
    assert folder.values["lora"] == {"rank": RANK, "alpha": ALPHA, "modules": list(spec.modules)}


@pytest.mark.parametrize("layout", ["veomni_dp2", "megatron_tp2_dp2"])
def test_bfloat16_base_under_float32_adapters(layout, tiny_model, start, tmp_path):
    _, world_size, _, _ = LAYOUTS[layout]
    run_ranks(_precision_worker, world_size, tiny_model, start, tmp_path, layout)


def _precision_worker(tiny_model: Path, start: Path, out: Path, layout: str) -> None:
    """The base is held in bfloat16 and nowhere else; what is trained starts unrounded, and updates
    too small for bfloat16 add up.
    """
    engine = lora_engine(tiny_model, layout, lr=1e-6, dtype="bfloat16")
    engine.save(out / "fresh")
    dist.barrier()
    fresh = ShardFolder(out / "fresh")
    for name, shape in _lora(tiny_model)[1].items():
        assert torch.equal(
            whole(fresh, f"model/transformer.{name}"), start_values(name, shape, seed=0)
        ), name
    engine.load(start)
    dtypes = {
        "veomni": torch.float32,
        "megatron": torch.bfloat16,
    }  # of the adapters that the module holds
    for name, parameter in only(engine).transformer.named_parameters():
        is_trained = ".lora_" in name
        assert parameter.requires_grad == is_trained
        backend, _, _, _ = LAYOUTS[layout]
        assert parameter.dtype == (dtypes[backend] if is_trained else torch.bfloat16), name
    held = [*only(engine)._masters.values(), *only(engine)._optimized.values()]
    assert {tensor.dtype for tensor in held} == {torch.float32}
    assert all(".lora_" in name for name in [*only(engine)._masters, *only(engine)._optimized])

    source = load_file(tiny_model / "transformer" / "diffusion_pytorch_model.safetensors")
    base = named_tensors(engine.named_weights(1 << 20))
    assert all(
        torch.equal(base[f"transformer.{name}"], full.bfloat16().float())
        for name, full in source.items()
    )
    before = {name: piece.clone() for name, piece in only(engine)._masters.items()}
    figures = [engine.update(mine(engine), LOSS) for _ in range(3)]
    assert all(each["optim/grad_norm"] > 0 for each in figures)
    moved = unrounded = 0
    for name, piece in only(engine)._masters.items():
        moved += int((piece != before[name]).sum())
        unrounded += int((piece.bfloat16() != before[name].bfloat16()).sum())
    assert unrounded < moved / 2, "updates too large to show what the masters are for"
    engine.save(out / "checkpoint")
    dist.barrier()
    resumed = lora_engine(tiny_model, layout, lr=1e-6, dtype="bfloat16")
    resumed.load(out / "checkpoint")
    assert torch.equal(
        log_probs(resumed, mine(engine)).log_probs_NW, log_probs(engine, mine(engine)).log_probs_NW
    )


def _trainer(tiny_model: Path, layout: str) -> Engine:
    return lora_engine(tiny_model, layout, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM)
