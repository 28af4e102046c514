"""What is the Megatron engine's own: masters beside rounded weights, and gradient buffers.

Its gradients and checkpoints are checked together with VeOmni's, in test_engine_layouts.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megadiff.engines.engine import Engine
from megadiff.tensors.shards import ShardFolder
from megadiff.train.log_probs import log_probs
from tests.distributed.engines import LOSS, build, differing, mine, only, whole
from tests.distributed.ranks import run_ranks


def test_bfloat16_weights_with_float32_masters(tiny_model, tmp_path):
    run_ranks(_precision_worker, 4, tiny_model, tmp_path, {"tp": 2})
    exact, mixed = (
        json.loads((tmp_path / f"{dtype}.json").read_text()) for dtype in ("float32", "bfloat16")
    )
    for name in ("loss/policy", "optim/grad_norm"):
        assert [each[name] for each in mixed] == pytest.approx(
            [each[name] for each in exact], rel=0.03
        )
    source = load_file(tiny_model / "transformer" / "diffusion_pytorch_model.safetensors")
    start, end = ShardFolder(tmp_path / "start"), ShardFolder(tmp_path / "bfloat16")
    num_moved = num_moved_in_bfloat16 = num_elements = 0
    for name, weight in source.items():
        assert torch.equal(whole(start, f"model/transformer.{name}"), weight), (
            name
        )  # not its bfloat16 rounding
        moved = whole(end, f"model/transformer.{name}")
        num_moved += int((moved != weight).sum())
        num_moved_in_bfloat16 += int((moved.bfloat16() != weight.bfloat16()).sum())
        num_elements += weight.numel()
    assert num_moved_in_bfloat16 < num_elements / 4, (
        "updates too large to show what the masters are for"
    )
    assert num_moved > num_elements / 2


def _precision_worker(tiny_model: Path, out: Path, sizes: dict[str, int]) -> None:
    _engine(tiny_model, sizes, lr=1e-6, dtype="bfloat16").save(out / "start")
    for dtype in ("bfloat16", "float32"):
        engine = _engine(tiny_model, sizes, lr=1e-6, dtype=dtype)
        batch = mine(engine, 1.0)
        figures = [engine.update(batch, LOSS) for _ in range(4)]
        if engine.mesh.rank == 0:
            (out / f"{dtype}.json").write_text(json.dumps(figures))
        assert {p.dtype for p in only(engine).transformer.parameters()} == {getattr(torch, dtype)}
        engine.save(out / dtype)
        dist.barrier()
        resumed = _engine(tiny_model, sizes, lr=1e-6, dtype=dtype)
        resumed.load(out / dtype)
        assert torch.equal(
            log_probs(resumed, batch).log_probs_NW, log_probs(engine, batch).log_probs_NW
        )


def test_gradient_buffers_are_empty_between_updates(tiny_model, tmp_path):
    run_ranks(_emptied_worker, 2, tiny_model, tmp_path)


def _emptied_worker(tiny_model: Path, out: Path) -> None:
    """Beside an engine whose buffers keep their memory; after an error, and while another engine
    writes over what was freed.
    """
    for dtype, rank in (("float32", 0), ("bfloat16", 4)):
        emptied, kept = engines = [
            _engine(tiny_model, {}, lr=5e-4, dtype=dtype, lora=(rank, 8.0)) for _ in range(2)
        ]
        assert _buffer_bytes(emptied) == [0]
        only(kept)._ddp.offload_grad_buffers = lambda **_: None
        views = [parameter.main_grad for parameter in _with_main_grad(emptied)]
        batch = mine(kept)
        for step in range(3):
            before, after = (engine.update(batch, LOSS) for engine in (kept, emptied))
            assert after == before and before["optim/grad_norm"] > 0
            assert _buffer_bytes(emptied) == [0] < _buffer_bytes(kept)
            for engine in engines if step == 1 else ():
                broken = replace(batch, advantages_N=torch.full_like(batch.advantages_N, torch.nan))
                with pytest.raises(FloatingPointError, match="the weights were left as they were"):
                    engine.update(broken, LOSS)
        assert all(
            view is p.main_grad for view, p in zip(views, _with_main_grad(emptied), strict=True)
        )
        for name, engine in zip(("emptied", "kept"), engines, strict=True):
            engine.save(out / f"{dtype}_{name}")
        dist.barrier()
        assert differing(out / f"{dtype}_emptied", out / f"{dtype}_kept") == []


def _with_main_grad(engine: Engine) -> list[Tensor]:
    return [
        parameter
        for parameter in only(engine).transformer.parameters()
        if hasattr(parameter, "main_grad")
    ]


def _buffer_bytes(engine: Engine) -> list[int]:
    """Distinct sizes of the storages under the gradients of all parameters."""
    return sorted(
        {parameter.main_grad.untyped_storage().nbytes() for parameter in _with_main_grad(engine)}
    )


def _engine(tiny_model: Path, sizes: Mapping[str, int], **options: object) -> Engine:
    return build(tiny_model, sizes, backend="megatron", **options)
