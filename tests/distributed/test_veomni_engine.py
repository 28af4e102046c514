"""The VeOmni engine against plain diffusers and against itself under other layouts, in fp32 on gloo
processes.

Engines run in processes of their own: VeOmni replaces diffusers' forward process-wide, this one
holds the reference.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.engines.compiling import VARIANTS
from megadiff.engines.engine import Engine
from megadiff.engines.microbatch import microbatches
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.train.log_probs import log_probs
from tests.distributed.engines import LOSS, SAMPLING, build, mine, only, train_batch
from tests.distributed.ranks import run_ranks

ALONE = (1, {})
LAYOUTS = {
    "dp1": ALONE,
    "dp2": (2, {}),
    "sp2": (2, {"sp": 2}),
    "hsdp2": (2, {"dp_replicate": 2}),
    "dp2_sp2": (4, {"sp": 2}),
    "hsdp2_shard2": (4, {"dp_replicate": 2}),
    "hsdp2_sp2": (4, {"dp_replicate": 2, "sp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_that_of_stock_diffusers_for_every_layout(
    layout, tiny_model, reference, tmp_path
):
    world_size, sizes = LAYOUTS[layout]
    run_ranks(_gradient_worker, world_size, tiny_model, tmp_path, sizes)
    for scale, expected in reference.items():
        found = load_file(tmp_path / f"gradients_{scale}.safetensors")
        assert found.keys() == expected.keys()
        for name in expected:
            tolerance = 1e-5 * float(expected[name].abs().max())
            torch.testing.assert_close(
                found[name], expected[name], rtol=1e-5, atol=tolerance, msg=name
            )


def _gradient_worker(tiny_model: Path, out: Path, sizes: dict[str, int]) -> None:
    engine = _engine(tiny_model, sizes, lr=0.0)
    for scale in (1.0, 4.0):
        captured: dict[str, Tensor] = {}
        hook = only(engine).optimizer.register_step_pre_hook(
            lambda *_, captured=captured: captured.update(_full_gradients(engine))
        )
        engine_batch = mine(engine, scale)
        metrics = engine.update(engine_batch, LOSS)
        hook.remove()
        captured |= {name: torch.tensor(value) for name, value in metrics.items()}
        if engine.mesh.rank == 0:
            save_file(captured, out / f"gradients_{scale}.safetensors")


def test_compiled_blocks_change_nothing(tiny_model):
    run_ranks(_compiled_worker, 1, tiny_model)


def _compiled_worker(tiny_model: Path) -> None:
    """With LoRA, whose switch compiled code must see; by a backend that leaves arithmetic as it
    is.
    """
    torch.compile = partial(torch.compile, backend="eager")
    plain, compiled = (
        build(tiny_model, {}, backend="veomni", lora=(4, 6.0), compiled=each)
        for each in (False, True)
    )
    batch = mine(plain)
    norms = [engine.update(batch, LOSS)["optim/grad_norm"] for engine in (plain, compiled)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and norms[0] > 0
    found = [log_probs(engine, batch).log_probs_NW for engine in (plain, compiled)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-7)
    with compiled.reference():
        of_base = log_probs(compiled, batch).log_probs_NW
    assert (of_base - found[1]).abs().max() > 1e-4, "the adapter is compiled in"
    stats = torch._dynamo.utils.counters
    assert 0 < stats["stats"]["unique_graphs"] <= VARIANTS and not stats["graph_break"], stats


def test_an_update_gathers_weights_once(tiny_model):
    run_ranks(_gathers_worker, 2, tiny_model)


def _gathers_worker(tiny_model: Path) -> None:
    """However many microbatches and passes it has, where memory allows.

    The gradient is the same.
    """
    calls = []
    name = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )  # from torch 2.13 on
    gather = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return gather(*args, **kwargs)

    setattr(dist, name, counting)

    def update(*, size: int, syncs_each: bool, scale: float) -> tuple[int, float]:
        engine = build(tiny_model, {}, backend="veomni", microbatch_size=size)
        member = only(engine)
        member._sync_every_microbatch = syncs_each
        batch = mine(engine, scale)
        calls.clear()
        norm = engine.update(batch, LOSS)["optim/grad_norm"]
        count = len(calls)
        groups = [module._get_fsdp_state()._fsdp_param_group for module in member._fsdp_modules]
        assert len(groups) == 3 and not any(group.is_unsharded for group in groups)
        assert all(group._reshard_after_forward for group in groups[1:]), (
            "log_probs would keep all weights"
        )
        return count, norm

    # a root and two blocks: gathered once; or the root once, a block in each pass and in its
    # backward, for each of 3
    for scale, counts in ((1.0, [3, 15]), (2.0, [3, 27])):
        (one, norm), *others = (
            update(size=size, syncs_each=syncs_each, scale=scale)
            for size, syncs_each in ((8, True), (3, False), (3, True))
        )
        assert [count for count, _ in others] == counts and one == counts[1] / 3
        assert [other for _, other in others] == pytest.approx([norm] * 2, rel=1e-6)


def test_another_text_length_compiles_nothing(tiny_model):
    run_ranks(_lengths_worker, 1, tiny_model)


def _lengths_worker(tiny_model: Path) -> None:
    """Of the same values as uncompiled blocks, by one variant for all lengths without padding, and
    one with.
    """
    torch.compile = partial(torch.compile, backend="eager")
    plain, compiled = (
        build(tiny_model, {}, backend="veomni", compiled=each) for each in (False, True)
    )
    whole = mine(plain)
    counts = [0]
    for num_padded in (0, 1):
        for length in (
            5,
            7,
            9,
            16,
        ):  # 16: also the pairs of a head that are rotated, and the joint length with 7
            embeds = torch.randn(*whole.conditioning["prompt_embeds"].shape[:1], length, 64)
            mask = torch.ones(embeds.shape[:2]).bool()
            mask[0, length - num_padded :] = False
            batch = replace(whole, conditioning={"prompt_embeds": embeds, "prompt_mask": mask})
            expected, found = (
                log_probs(engine, batch).log_probs_NW for engine in (plain, compiled)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < counts[1] == counts[4] < counts[5] == counts[8], counts


@pytest.fixture(scope="module")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Layout → the folder of a checkpoint that it wrote after one update, with its state then and
    one update on.
    """

    @cache
    def save(layout: str) -> Path:
        world_size, sizes = LAYOUTS[layout]
        out = tmp_path_factory.mktemp(layout)
        run_ranks(_save_worker, world_size, tiny_model, out, sizes)
        return out

    return save


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("dp1", "dp1"), ("dp1", "dp2"), ("dp2", "dp1"), ("dp2", "sp2"), ("hsdp2_shard2", "dp2")],
)
def test_checkpoint_is_bit_exact_under_another_layout(writer, reader, tiny_model, saved, tmp_path):
    world_size, sizes = LAYOUTS[reader]
    run_ranks(_load_worker, world_size, tiny_model, saved(writer), tmp_path, sizes)
    expected, found = (
        load_file(saved(writer) / "at_save.safetensors"),
        load_file(tmp_path / "loaded.safetensors"),
    )
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    uninterrupted, resumed = (
        load_file(saved(writer) / "next.safetensors"),
        load_file(tmp_path / "next.safetensors"),
    )
    for name in uninterrupted:
        torch.testing.assert_close(
            resumed[name], uninterrupted[name], rtol=1e-5, atol=2e-6, msg=name
        )
    if writer == reader:
        assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


def test_replicas_of_a_shard_are_written_once(saved):
    sizes = [
        file.stat().st_size for file in sorted((saved("hsdp2_shard2") / "checkpoint").iterdir())
    ]
    assert len(sizes) == 4
    assert max(sizes[2:]) < min(sizes[:2]) / 100


@pytest.mark.parametrize("layout", ["dp1", "sp2"])
def test_weights_and_reference(layout, tiny_model):
    world_size, sizes = LAYOUTS[layout]
    run_ranks(_weights_worker, world_size, tiny_model, sizes)


def test_mixed_precision_and_failures(tiny_model, tmp_path):
    save_file(
        {"velocity": _stock_velocity(tiny_model, torch.bfloat16)}, tmp_path / "stock.safetensors"
    )
    run_ranks(_precision_worker, 1, tiny_model, tmp_path / "stock.safetensors")


def test_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(
        torch.multiprocessing.ProcessRaisedException, match="rank 1 is the one that fails"
    ):
        run_ranks(_failing_worker, 2)


def _failing_worker() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 is the one that fails")
    time.sleep(60)


def _stock_velocity(tiny_model: Path, dtype: torch.dtype) -> Tensor:
    transformer = QwenImageTransformer2DModel.from_pretrained(
        tiny_model / "transformer", torch_dtype=dtype
    )
    return _velocity(QwenImageAdapter(tiny_model), transformer)


@torch.no_grad()
def _velocity(adapter: QwenImageAdapter, transformer: Callable) -> Tensor:
    """[16, L, C] float32: every pair of the batch, in the engine's own microbatches."""
    pieces, sampling = (
        microbatches(train_batch(adapter), torch.arange(16), 3, torch.device("cpu")),
        SAMPLING,
    )
    rows = [
        adapter.velocity(transformer, p.latents_BLC, p.sigma_B, p.conditioning, sampling)
        for p in pieces
    ]
    return torch.cat(rows)


def _precision_worker(tiny_model: Path, stock: Path) -> None:
    """bfloat16 compute over float32 masters; a gradient that is not finite changes nothing;
    refusals.
    """
    batch = train_batch(QwenImageAdapter(tiny_model))
    engine = _engine(tiny_model, {}, dtype="bfloat16")
    torch.testing.assert_close(
        _velocity(engine.adapter, only(engine).transformer), load_file(stock)["velocity"]
    )
    engine.update(batch, LOSS)
    assert {p.dtype for p in only(engine).transformer.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in only(engine).optimizer.state.values()} == {torch.float32}

    before = log_probs(engine, batch).log_probs_NW
    broken = replace(batch, advantages_N=torch.full_like(batch.advantages_N, torch.nan))
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        engine.update(broken, LOSS)
    assert torch.equal(log_probs(engine, batch).log_probs_NW, before)

    unweighted = replace(batch, weights_N=torch.zeros(8), denominator=0.0)
    assert engine.update(unweighted, LOSS)["optim/grad_norm"] == 0
    with pytest.raises(ValueError, match="keeps no reference weights"), engine.reference():
        pass


def _save_worker(tiny_model: Path, out: Path, sizes: dict[str, int]) -> None:
    engine = _engine(tiny_model, sizes)
    batch = mine(engine, 1.0)
    engine.update(batch, LOSS)
    engine.save(out / "checkpoint")
    _dump(engine, out / "at_save.safetensors")
    metrics = engine.update(batch, LOSS)
    _dump(engine, out / "next.safetensors", metrics)


def _load_worker(tiny_model: Path, saved: Path, out: Path, sizes: dict[str, int]) -> None:
    engine = _engine(tiny_model, sizes)
    engine.load(saved / "checkpoint")
    _dump(engine, out / "loaded.safetensors")
    metrics = engine.update(mine(engine, 1.0), LOSS)
    _dump(engine, out / "next.safetensors", metrics)


def _weights_worker(tiny_model: Path, sizes: dict[str, int]) -> None:
    engine = _engine(tiny_model, sizes, keep_reference=True)
    source = load_file(tiny_model / "transformer" / "diffusion_pytorch_model.safetensors")
    for dtype in ("float32", "bfloat16"):
        engine.config.model.dtype = dtype
        buckets = list(engine.named_weights(100_000))
        assert all(
            len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 100_000 for bucket in buckets
        )
        weights = dict(pair for bucket in buckets for pair in bucket)
        assert weights.keys() == {f"transformer.{name}" for name in source}
        expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in source.items()}
        assert all(torch.equal(weights[f"transformer.{name}"], expected[name]) for name in source)

    batch = mine(engine, 4.0)
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


def _dump(engine: Engine, file: Path, metrics: Mapping[str, float] | None = None) -> None:
    """Full weights, moments and figures, written by rank 0."""
    values = {name: torch.tensor(value) for name, value in (metrics or {}).items()}
    for name, parameter in only(engine).transformer.named_parameters():
        values[name] = parameter.detach().full_tensor().clone()
        for kind, value in only(engine).optimizer.state.get(parameter, {}).items():
            values[f"{kind}/{name}"] = (
                value.full_tensor() if hasattr(value, "full_tensor") else value
            ).clone()
    if engine.mesh.rank == 0:
        save_file(values, file)


def _engine(tiny_model: Path, sizes: Mapping[str, int], **options: object) -> Engine:
    return build(tiny_model, sizes, backend="veomni", microbatch_size=3, **options)


def _full_gradients(engine: Engine) -> dict[str, Tensor]:
    named = only(engine).transformer.named_parameters()
    return {name: p.grad.full_tensor() for name, p in named if p.grad is not None}
