"""What is the VeOmni engine's own: compiled blocks, when weights are gathered, and its precision.

Its gradients and checkpoints are checked together with Megatron's, in test_engine_layouts.py.
Engines run in processes of their own: VeOmni replaces diffusers' forward process-wide, this one
holds the reference.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.engines.compiling import VARIANTS
from megadiff.engines.microbatch import microbatches
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.train.log_probs import log_probs
from tests.distributed.engines import LOSS, SAMPLING, build, mine, only, train_batch
from tests.distributed.ranks import run_ranks


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


def test_mixed_precision(tiny_model, tmp_path):
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
    """bfloat16 compute over float32 masters, and what is refused without a reference."""
    batch = train_batch(QwenImageAdapter(tiny_model))
    engine = build(tiny_model, {}, backend="veomni", microbatch_size=3, dtype="bfloat16")
    torch.testing.assert_close(
        _velocity(engine.adapter, only(engine).transformer), load_file(stock)["velocity"]
    )
    engine.update(batch, LOSS)
    assert {p.dtype for p in only(engine).transformer.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in only(engine).optimizer.state.values()} == {torch.float32}

    with pytest.raises(ValueError, match="keeps no reference weights"), engine.reference():
        pass
