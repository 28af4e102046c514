"""Optimizer state on the host changes no bit, frees what the planner says, and can be saved there.

Both engines on two gloo ranks in bfloat16, where Megatron's masters move as well. "Host memory" is
plain memory here; the tensors are emptied as on a GPU.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.config.schema import LoraConfig
from megadiff.engines.engine import Engine
from megadiff.engines.gate import StepGate
from megadiff.engines.gathering import local
from megadiff.engines.offload import Place
from megadiff.engines.sharded import NonFiniteError
from megadiff.parallel.mesh import Layout
from megadiff.planner.engine_memory import STEP_COUNTER, Placing, static_bytes
from megadiff.planner.work import model_shape
from megadiff.tensors.fingerprint import fingerprints
from tests.distributed.engines import LOSS, at_step, build, differing, mine, only
from tests.distributed.ranks import run_ranks
from tests.kept_activations import activation_work

NUM_RANKS = 2


@pytest.mark.parametrize("backend", ["veomni", "megatron"])
def test_it_changes_no_bit_and_frees_what_the_planner_says(
    tiny_model: Path, tmp_path: Path, backend: str
) -> None:
    run_ranks(_worker, NUM_RANKS, tiny_model, tmp_path, backend)


def _worker(model: Path, out: Path, backend: str) -> None:
    sizes = dict(backend=backend, dtype="bfloat16", average_decay=0.5, keep_reference=True, lr=1e-2)
    engines = [build(model, {}, offload=offload, **sizes) for offload in ("never", "always")]
    kept, moved = engines
    _check_freed(kept, moved, backend)

    for step in range(3):
        assert _step(moved, step) == _step(kept, step), step
        for engine, name in ((kept, "kept"), (moved, "moved")):
            engine.snapshot().write(out / f"{name}_{step}")  # as the step ends: copies are begun
        dist.barrier()
        assert differing(out / f"kept_{step}", out / f"moved_{step}") == [], step

    assert _skipped_batch(moved) == _skipped_batch(kept)
    for name in ("averaged", "reference"):
        assert _other_policy(moved, name) == _other_policy(kept, name), name

    moved.offload()
    moved.load(out / "kept_1")  # into the host's copies, with moments that replace others
    assert _place(moved) is Place.HOST
    kept.load(out / "kept_1")
    assert _step(moved, 5) == _step(kept, 5)
    _check_rescue(kept, moved, out)


def _check_freed(kept: Engine, moved: Engine, backend: str) -> None:
    """Both after one update: what is on the device, storage by storage."""
    assert _place(moved) is Place.HOST  # a checkpoint's moments could not wait on the device
    batch = mine(kept)
    for engine in (kept, moved):
        engine.update(batch, LOSS)
    assert _device_bytes(moved) == _device_bytes(kept)
    for engine in (kept, moved):
        engine.offload()
    freed = _device_bytes(kept) - _device_bytes(moved)

    layout = Layout(world_size=NUM_RANKS, dp=NUM_RANKS, dp_replicate=1, sp=1, tp=1)
    work = replace(activation_work(kept.adapter, 2), keeps_average=True)
    shape = model_shape(kept.adapter, LoraConfig())
    static = static_bytes(shape, Placing(backend=backend, layout=layout), work, offloads=True)
    counters = STEP_COUNTER * len(shape.trained)  # of a rank at most: they stay on the device

    # Megatron's averages of untrained weights are on the host anyway; here that is the device
    untrained = only(kept)._average.keys() - only(kept)._optimized.keys()
    on_host = sum(only(kept)._average[name].nbytes for name in untrained)
    found = torch.tensor([freed - on_host])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)  # the planner tells of the fullest rank
    planned = static.optimizer + static.average
    assert planned - counters <= int(found) <= planned, (int(found), planned)


def _step(engine: Engine, step: int) -> str:
    """Make a step as the loop does, and return all that it shows, as text."""
    batch = mine(engine)
    engine.offload()
    assert _place(engine) is _expected(engine, Place.HOST)
    seen = [_sent(engine), engine.velocities(batch).tolist()]
    for update in range(2):
        seen.append(engine.update(at_step(batch, 2 * step + update), LOSS))
        assert _place(engine) is Place.DEVICE
    engine.offload(waits=False)
    assert _place(engine) is _expected(engine, Place.LEAVING)
    return json.dumps(seen)


def _skipped_batch(engine: Engine) -> str:
    """Step over a batch between two others; the state is then still on its way."""
    batch = mine(engine)
    engine.offload()
    broken = replace(batch, advantages_N=torch.full_like(batch.advantages_N, torch.nan))
    with pytest.raises(NonFiniteError):
        engine.update(broken, LOSS)
    assert _place(engine) is _expected(engine, Place.RETURNING)
    engine.offload(waits=False)
    engine.offload()
    assert _place(engine) is _expected(engine, Place.HOST)
    return json.dumps([_sent(engine), engine.update(batch, LOSS), _sent(engine)])


def _other_policy(engine: Engine, name: str) -> str:
    """Use other weights, begun while state leaves and while it is on the host."""
    engine.offload(waits=False)
    seen = []
    for _ in range(2):
        with getattr(engine, name)():
            assert _place(engine) is _expected(engine, Place.HOST)
            seen.append(_sent(engine))
        seen.append(_sent(engine))
    assert seen[0] == seen[2] != seen[1] == seen[3]
    return json.dumps(seen)


def _check_rescue(kept: Engine, moved: Engine, out: Path) -> None:
    """A rescue's thread saves the policy wherever the state is, and inside averaged()."""
    kept.save(out / "whole")
    moves = {
        Place.LEAVING: lambda: moved.offload(waits=False),
        Place.HOST: moved.offload,
        Place.RETURNING: lambda: only(moved).onload(waits=False),
    }
    for place, move in moves.items():
        move()
        assert _place(moved) is place
        _save_as_a_rescue(moved, out / place.name)
        assert differing(out / "whole", out / place.name) == [], place

    moved.offload()
    inside = moved.averaged()
    inside.__enter__()
    _save_as_a_rescue(moved, out / "averaged")
    assert differing(out / "whole", out / "averaged") == []


def _save_as_a_rescue(engine: Engine, folder: Path) -> None:
    thread = threading.Thread(target=engine.save_now, args=(folder, 10.0))
    thread.start()
    thread.join()
    dist.barrier()
    # the rescue has ended the gate; here the engine goes on
    engine.gate = StepGate(engine.mesh.device)
    only(engine).gate = engine.gate


def _sent(engine: Engine) -> dict[str, str]:
    """Return the fingerprints of what a push would send."""
    tensors = {name: tensor for bucket in engine.named_weights(1 << 20) for name, tensor in bucket}
    return fingerprints(tensors)


def _place(engine: Engine) -> Place:
    return only(engine)._on_host._place


def _expected(engine: Engine, place: Place) -> Place:
    return place if engine.config.engine.offload == "always" else Place.DEVICE


def _device_bytes(engine: Engine) -> int:
    """Sum the distinct storages of all tensors of an engine that would be on a GPU."""
    member = only(engine)
    held = [*member.transformer.parameters(), *member._optimized.values()]
    held += [*member._masters.values(), *member._average.values()]
    for state in member.optimizer.state.values():
        held += state.values()
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in _local(held)
    }
    return sum(storages.values())


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor.detach()) for tensor in tensors]
