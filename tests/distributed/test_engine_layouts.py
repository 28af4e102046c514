"""Both engines against plain diffusers and against themselves and each other under other layouts.

In fp32 on gloo processes, several checks a process: starting one takes longer than most of them.
VeOmni replaces diffusers' forward in a whole process. This one holds the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megadiff.engines.engine import Engine
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.tensors.shards import ShardFolder
from megadiff.train.log_probs import log_probs
from tests.distributed.engines import (
    LOSS,
    at_step,
    build,
    differing,
    mine,
    stock_backward,
    stock_transformer,
    train_batch,
    updates,
    whole,
    write_gradients,
)
from tests.distributed.ranks import run_ranks

# of each engine: world size, sizes of the axes; under tp tokens are split over it as well
LAYOUTS: dict[str, dict[str, tuple[int, dict[str, int]]]] = {
    "veomni": {
        "dp1": (1, {}),
        "dp2": (2, {}),
        "sp2": (2, {"sp": 2}),
        "hsdp2": (2, {"dp_replicate": 2}),
        "dp2_sp2": (4, {"sp": 2}),
        "hsdp2_shard2": (4, {"dp_replicate": 2}),
        "hsdp2_sp2": (4, {"dp_replicate": 2, "sp": 2}),
    },
    "megatron": {
        "dp2": (2, {}),
        "sp2": (2, {"sp": 2}),
        "tp2_whole_tokens": (2, {"tp": 2, "sequence_parallel": False}),
        "tp2": (2, {"tp": 2}),
        "tp2_dp2": (4, {"tp": 2}),
        "tp4": (4, {"tp": 4}),
        "tp2_sp2": (4, {"tp": 2, "sp": 2}),
    },
}
LONG = ("megatron", "tp2_dp2")
LONG_STEPS, STEPS = 20, 6  # of that run, and of others; the last two come after the checkpoint
LR, WEIGHT_DECAY, MAX_NORM = 5e-4, 1e-1, 0.05


@pytest.mark.parametrize(
    ("backend", "layout"), [(backend, name) for backend in LAYOUTS for name in LAYOUTS[backend]]
)
def test_gradients_weights_and_reference_for_every_layout(
    backend, layout, tiny_model, reference, tmp_path
):
    world_size, sizes = LAYOUTS[backend][layout]
    run_ranks(_gradient_worker, world_size, tiny_model, tmp_path, backend, sizes)
    for scale, expected in reference.items():
        found = ShardFolder(tmp_path / str(scale))
        gradients = {name for name, value in expected.items() if value.ndim}
        assert found.shapes.keys() == gradients
        for name in gradients:
            tolerance = 1e-5 * float(expected[name].abs().max())
            torch.testing.assert_close(
                whole(found, name), expected[name], rtol=1e-5, atol=tolerance, msg=name
            )
        for name in expected.keys() - gradients:
            assert found.values[name] == pytest.approx(float(expected[name]), rel=1e-5), name


def _gradient_worker(tiny_model: Path, out: Path, backend: str, sizes: dict[str, int]) -> None:
    engine = build(tiny_model, sizes, backend=backend, lr=0.0, keep_reference=True)
    for scale in (1.0, 4.0):
        write_gradients(engine, mine(engine, scale), out / str(scale))
    _check_named_weights(engine, tiny_model)
    engine.config.optim.lr = LR
    _check_reference(engine)
    _check_broken_gradient(engine)


def _check_named_weights(engine: Engine, tiny_model: Path) -> None:
    source = load_file(tiny_model / "transformer" / "diffusion_pytorch_model.safetensors")
    stock_order = [
        f"transformer.{name}" for name, _ in engine.adapter.empty_transformer().named_parameters()
    ]
    for dtype in (torch.float32, torch.bfloat16):
        engine.config.model.dtype = str(dtype).removeprefix("torch.")
        buckets = list(engine.named_weights(100_000))
        assert all(
            len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 100_000 for bucket in buckets
        )
        weights = dict(pair for bucket in buckets for pair in bucket)
        assert list(weights) == stock_order
        assert all(
            torch.equal(weights[f"transformer.{name}"], full.to(dtype))
            for name, full in source.items()
        )
    for tensor in weights.values():
        tensor.zero_()  # the receiver's own


def _check_reference(engine: Engine) -> None:
    batch = mine(engine, 1.0)
    start = log_probs(engine, batch)
    for _ in range(2):
        engine.update(batch, LOSS)
    policy = log_probs(engine, batch)
    assert (policy.log_probs_NW - start.log_probs_NW).abs().max() > 1e-3
    for _ in range(2):
        with engine.reference():
            reference = log_probs(engine, batch)
        assert torch.equal(reference.log_probs_NW, start.log_probs_NW)
        assert torch.equal(reference.means_NWLC, start.means_NWLC)
        assert torch.equal(log_probs(engine, batch).log_probs_NW, policy.log_probs_NW)


def _check_broken_gradient(engine: Engine) -> None:
    """One rank's gradient is not finite: all ranks raise, nothing changes, and the next update is
    sound.
    """
    batch = mine(engine, 1.0)
    before = log_probs(engine, batch).log_probs_NW
    broken = replace(batch, advantages_N=torch.full_like(batch.advantages_N, torch.nan))
    with pytest.raises(
        FloatingPointError, match="gradient norm is nan; the weights were left as they were"
    ):
        engine.update(broken if engine.mesh.dp_rank == 0 else batch, LOSS)
    assert torch.equal(log_probs(engine, batch).log_probs_NW, before)
    unweighted = replace(batch, weights_N=torch.zeros_like(batch.weights_N), denominator=0.0)
    assert engine.update(unweighted, LOSS)["optim/grad_norm"] == 0


@pytest.fixture(scope="module")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(engine, layout) → the folder of a run: a checkpoint two updates before its end, all figures,
    last weights.
    """

    @cache
    def save(backend: str, layout: str) -> Path:
        world_size, sizes = LAYOUTS[backend][layout]
        out = tmp_path_factory.mktemp(f"{backend}_{layout}")
        run_ranks(
            _run_worker, world_size, tiny_model, out, backend, sizes, _num_steps(backend, layout)
        )
        return out

    return save


def _num_steps(*run: str) -> int:
    return LONG_STEPS if run == LONG else STEPS


def _run_worker(
    tiny_model: Path, out: Path, backend: str, sizes: dict[str, int], num_steps: int
) -> None:
    engine = _trainer(tiny_model, sizes, backend)
    figures = list(updates(engine, 0, num_steps - 2))
    engine.save(out / "checkpoint")
    _write_figures(out, engine, figures + list(updates(engine, num_steps - 2, num_steps)))
    engine.save(out / "end")


def test_twenty_steps_follow_stock_diffusers_and_adamw(tiny_model, saved):
    figures = json.loads((saved(*LONG) / "figures.json").read_text())
    expected, weights = _stock_run(tiny_model)
    norms = [each["optim/grad_norm"] for each in figures]
    assert norms == pytest.approx(expected, rel=1e-4)
    assert min(norms[1:]) < MAX_NORM < max(norms), "the clipping must act, but not always"
    end = ShardFolder(saved(*LONG) / "end")
    for name, weight in weights.items():
        torch.testing.assert_close(
            whole(end, f"model/transformer.{name}"), weight, rtol=1e-3, atol=1e-4, msg=name
        )


def _stock_run(tiny_model: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms before clipping of LONG_STEPS updates by torch's AdamW in one process, and the
    last weights.
    """
    transformer, adapter = stock_transformer(tiny_model), QwenImageAdapter(tiny_model)
    parameters = dict(transformer.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    norms = []
    for step in range(LONG_STEPS):
        stock_backward(transformer, adapter, at_step(train_batch(adapter), step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("megatron", "tp2_dp2"), ("megatron", "tp2_dp2")),
        (("veomni", "dp2"), ("megatron", "tp2")),
        (("megatron", "tp2_dp2"), ("veomni", "sp2")),
        (("megatron", "tp2"), ("megatron", "tp4")),
        (("veomni", "dp1"), ("veomni", "dp1")),
        (("veomni", "dp1"), ("veomni", "dp2")),
        (("veomni", "dp2"), ("veomni", "dp1")),
        (("veomni", "dp2"), ("veomni", "sp2")),
        (("veomni", "hsdp2_shard2"), ("veomni", "dp2")),
    ],
    ids=lambda place: "_".join(place),
)
def test_checkpoint_goes_on_under_another_engine_or_layout(
    writer, reader, tiny_model, saved, tmp_path
):
    backend, layout = reader
    world_size, sizes = LAYOUTS[backend][layout]
    first = _num_steps(*writer) - 2
    run_ranks(
        _resume_worker,
        world_size,
        tiny_model,
        saved(*writer) / "checkpoint",
        tmp_path,
        backend,
        sizes,
        first,
    )
    assert differing(saved(*writer) / "checkpoint", tmp_path / "again") == []
    uninterrupted = json.loads((saved(*writer) / "figures.json").read_text())[first:]
    resumed = json.loads((tmp_path / "figures.json").read_text())
    for found, expected in zip(resumed, uninterrupted, strict=True):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-4 * 1e-3)
    if writer == reader:
        assert resumed == uninterrupted
        assert differing(saved(*writer) / "end", tmp_path / "end") == []


def _resume_worker(
    tiny_model: Path, checkpoint: Path, out: Path, backend: str, sizes: dict[str, int], first: int
) -> None:
    engine = _trainer(tiny_model, sizes, backend)
    engine.load(checkpoint)
    engine.save(out / "again")
    _write_figures(out, engine, list(updates(engine, first, first + 2)))
    engine.save(out / "end")


def test_replicas_of_a_shard_are_written_once(saved):
    files = sorted((saved("veomni", "hsdp2_shard2") / "checkpoint").iterdir())
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 4
    assert max(sizes[2:]) < min(sizes[:2]) / 100


def _write_figures(out: Path, engine: Engine, figures: list[dict[str, float]]) -> None:
    if engine.mesh.rank == 0:
        (out / "figures.json").write_text(json.dumps(figures))


def _trainer(tiny_model: Path, sizes: Mapping[str, int], backend: str) -> Engine:
    return build(
        tiny_model, sizes, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM, backend=backend
    )
