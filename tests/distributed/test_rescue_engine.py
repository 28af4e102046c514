"""A run that is stopped in the middle of a real engine's work saves the policy whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.checkpoint.run_folders import whole_looking
from megadiff.engines.components import ComponentsEngine
from megadiff.train.board import Board
from megadiff.train.rescue import Rescue
from megadiff.types import Progress
from tests.distributed.engines import LOSS, build, mine
from tests.distributed.ranks import run_ranks

STOP_S = 60.0


def test_a_stop_while_other_weights_are_in_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    """Inside averaged() or reference() the masters hold other weights; the policy is saved."""
    run_ranks(_stop_inside, 1, tiny_model, tmp_path)


def _stop_inside(model: Path, out: Path) -> None:
    for name in ("averaged", "reference"):
        engine = _engine(model)
        trained = _weights(engine)
        inside = threading.Event()
        stopped = threading.Event()
        context = getattr(engine, name)()
        thread = threading.Thread(target=_stay_inside, args=(context, inside, stopped), daemon=True)
        thread.start()
        assert inside.wait(STOP_S)
        assert _differing(trained, _weights(engine)), name
        checkpoints, rescue = _run(engine, out / name)
        rescue.rescue("SIGTERM")
        assert not _differing(trained, _load(checkpoints, model)), name
        # the way out does not wait at a gate that stays closed: LEAVE_S would end the process
        stopped.set()
        thread.join(STOP_S)
        assert not thread.is_alive(), name
        assert not _differing(trained, _weights(engine)), name


def _stay_inside(
    context: AbstractContextManager[None], inside: threading.Event, stopped: threading.Event
) -> None:
    with pytest.raises(SystemExit), context:
        inside.set()
        assert stopped.wait(STOP_S)
        raise SystemExit(143)  # as a rescue's signal does, once it has saved


def test_a_stop_in_the_middle_of_a_periodic_save(tiny_model: Path, tmp_path: Path) -> None:
    """Either writer may be the faster one: there is one checkpoint of the step, and it is whole."""
    run_ranks(_stop_while_saving, 1, tiny_model, tmp_path)


def _stop_while_saving(model: Path, out: Path) -> None:
    for faster in ("rescue", "periodic"):
        engine = _engine(model)
        trained = _weights(engine)
        checkpoints, rescue = _run(engine, out / faster)
        pauses = {"rescue": Pause(), "periodic": Pause()}
        engine.save = partial(_slow_save, engine.save, pauses)  # type: ignore[method-assign]
        threads = [
            threading.Thread(target=checkpoints.save, args=(engine, Progress(step=1))),
            threading.Thread(target=rescue.rescue, args=("SIGTERM",)),
        ]
        for thread, writer in zip(threads, ("periodic", "rescue"), strict=True):
            thread.start()
            assert pauses[writer].begun.wait(STOP_S), (faster, writer)
        pauses[faster].over.set()
        deadline = time.monotonic() + STOP_S
        while not checkpoints.saved_step:
            assert time.monotonic() < deadline, faster
            time.sleep(0.01)
        for pause in pauses.values():
            pause.over.set()
        for thread in threads:
            thread.join(STOP_S)
            assert not thread.is_alive(), faster
        assert [path.name for path in whole_looking(checkpoints.folder)] == ["step_000001"]
        assert not list(checkpoints.folder.glob(".writing_*")), faster
        assert not _differing(trained, _load(checkpoints, model)), faster


class Pause:
    """Hold up one of the two writers once its tensors are on disk."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()


def _slow_save(
    stock_save: Callable[[Path], None], pauses: Mapping[str, Pause], folder: Path
) -> None:
    stock_save(folder)
    pause = pauses["rescue" if folder.name.endswith("_rescue") else "periodic"]
    pause.begun.set()
    assert pause.over.wait(STOP_S)


def _engine(model: Path) -> ComponentsEngine:
    """Build an engine whose policy, average and reference are three different things."""
    engine = build(model, {}, backend="veomni", keep_reference=True, average_decay=0.25)
    engine.update(mine(engine), LOSS)
    return engine


def _run(engine: ComponentsEngine, folder: Path) -> tuple[Checkpoints, Rescue]:
    """Return checkpoints and rescue of a run that has just finished its first step."""
    checkpoints = Checkpoints(folder, engine.config, engine.mesh)
    progress = Progress()
    board = Board(checkpoints.folder / ".ranks-test", rank=0, world_size=1)
    board.lay_out()
    rescue = Rescue(engine, checkpoints, board, progress)
    rescue.finish_step(progress, {})
    return checkpoints, rescue


def _load(checkpoints: Checkpoints, model: Path) -> dict[str, Tensor]:
    """Return the policy's weights of a run that is resumed from the newest checkpoint."""
    resumed = _engine(model)
    again = Checkpoints(checkpoints.folder.parent, resumed.config, resumed.mesh)
    assert again.load(resumed, lambda prompts: None).step == 1
    return _weights(resumed)


def _weights(engine: ComponentsEngine) -> dict[str, Tensor]:
    return {
        name: tensor.clone() for bucket in engine.named_weights(1 << 20) for name, tensor in bucket
    }


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name in first if not torch.equal(first[name], second[name])]
