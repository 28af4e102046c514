"""What the converter writes is what the engines write and read: the same files, and runs that start
from them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.convert.command import main
from megadiff.data.sampler import EpochOrder
from megadiff.engines.engine import Engine
from megadiff.types import Progress
from tests.distributed.engines import LOSS, build, mine
from tests.distributed.ranks import run_ranks
from tests.unit.convert.conversions import contents, seal

LORA = (4, 10.0)
TARGETS = {
    "tp": ("megatron", ["--to", "megatron", "--tp", "2"]),
    "dp": ("veomni", ["--to", "fsdp", "--dp", "2"]),
}


@pytest.mark.parametrize("lora", [(0, 0.0), LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_a_checkpoint_in_another_layout_is_bit_for_bit_what_that_engine_writes(
    tiny_model: Path, tmp_path: Path, axis: str, lora: tuple[int, float]
) -> None:
    """Trained on the other engine, with moments and an average; on it nothing is missing, and
    nothing is elsewhere.
    """
    other = "dp" if axis == "tp" else "tp"
    run_ranks(_train, 2, tiny_model, tmp_path / "trained", TARGETS[other][0], {other: 2}, lora)
    (tmp_path / "trained" / "config.yaml").write_text(f"model: {{path: {tiny_model}}}\n")
    seal(tmp_path / "trained")
    backend, options = TARGETS[axis]
    assert main([str(tmp_path / "trained"), str(tmp_path / "converted"), *options, "--verify"]) == 0
    run_ranks(
        _load_and_save,
        2,
        tiny_model,
        tmp_path / "converted",
        tmp_path / "again",
        backend,
        {axis: 2},
        lora,
    )
    converted, again = contents(tmp_path / "converted"), contents(tmp_path / "again")
    assert len(again) == 2 and again.items() <= converted.items()


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_a_run_starts_from_a_converted_model(tiny_model: Path, tmp_path: Path, axis: str) -> None:
    backend, options = TARGETS[axis]
    assert main([str(tiny_model), str(tmp_path / "start"), *options]) == 0
    run_ranks(_start, 2, tiny_model, tmp_path / "start", backend, {axis: 2})


def _engine(model: Path, backend: str, sizes: dict[str, int], lora: tuple[int, float]) -> Engine:
    return build(model, sizes, backend=backend, lora=lora, average_decay=0.25, budget=1)


def _train(
    model: Path, out: Path, backend: str, sizes: dict[str, int], lora: tuple[int, float]
) -> None:
    engine = _engine(model, backend, sizes, lora)
    for _ in range(2):
        engine.update(mine(engine), LOSS)
    engine.save(out)


def _load_and_save(
    model: Path,
    source: Path,
    out: Path,
    backend: str,
    sizes: dict[str, int],
    lora: tuple[int, float],
) -> None:
    engine = _engine(model, backend, sizes, lora)
    engine.load(source)
    engine.save(out)


def _start(model: Path, source: Path, backend: str, sizes: dict[str, int]) -> None:
    """As with checkpoint.resume=source: at step 0, with the weights of the model, and the first
    update is the same.
    """
    fresh, started = (build(model, sizes, backend=backend, budget=1) for _ in range(2))
    started.config.checkpoint.resume = str(source)
    order = EpochOrder(9, seed=0, shuffle=True)
    checkpoints = Checkpoints(source.parent / "run", started.config, started.mesh)
    assert checkpoints.load(started, order.load_state) == Progress()
    assert order.state()["position"] == 0
    for _ in range(2):
        expected, found = (
            dict(pair for bucket in engine.named_weights(1 << 20) for pair in bucket)
            for engine in (fresh, started)
        )
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert fresh.update(mine(fresh), LOSS) == started.update(mine(started), LOSS)
