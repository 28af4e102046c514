"""A run that is stopped in the middle of a real engine's work saves the policy whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.engines.engine import Engine
from megadiff.tensors.snapshot import Snapshot
from megadiff.train.board import Board
from megadiff.train.rescue import Rescue
from megadiff.types import Progress
from tests.distributed.engines import LOSS, build, mine, sent_weights
from tests.distributed.ranks import run_ranks

STOP_S = 60.0


def test_a_stop_while_other_weights_are_in_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    """Inside averaged() or reference() the masters hold other weights; the policy is saved."""
    run_ranks(_stop_inside, 1, tiny_model, tmp_path)


def _stop_inside(model: Path, out: Path) -> None:
    for name in ("averaged", "reference"):
        engine = _engine(model)
        trained = sent_weights(engine)
        inside = threading.Event()
        stopped = threading.Event()
        context = getattr(engine, name)()
        thread = threading.Thread(target=_stay_inside, args=(context, inside, stopped), daemon=True)
        thread.start()
        assert inside.wait(STOP_S)
        assert _differing(trained, sent_weights(engine)), name
        checkpoints, rescue = _run(engine, out / name)
        rescue.rescue("SIGTERM")
        assert not _differing(trained, _load(checkpoints, model)), name
        # the way out does not wait at a gate that stays closed: LEAVE_S would end the process
        stopped.set()
        thread.join(STOP_S)
        assert not thread.is_alive(), name
        assert not _differing(trained, sent_weights(engine)), name


def _stay_inside(
    context: AbstractContextManager[None], inside: threading.Event, stopped: threading.Event
) -> None:
    with pytest.raises(SystemExit), context:
        inside.set()
        assert stopped.wait(STOP_S)
        raise SystemExit(143)  # as a rescue's signal does, once it has saved


def test_a_stop_beside_a_write_that_begins_late(tiny_model: Path, tmp_path: Path) -> None:
    """Either writer may be the faster one: there is one checkpoint of the step, and it is whole."""
    run_ranks(_stop_while_saving, 1, tiny_model, tmp_path)


def _stop_while_saving(model: Path, out: Path) -> None:
    for faster in ("rescue", "periodic"):
        engine = _engine(model)
        trained = sent_weights(engine)
        checkpoints, rescue = _run(engine, out / faster)
        with _slow_writes() as pauses:
            thread = threading.Thread(target=rescue.rescue, args=("SIGTERM",))
            thread.start()
            assert pauses["rescue"].begun.wait(STOP_S), faster
            checkpoints.save(engine, Progress(step=1))
            assert pauses["periodic"].begun.wait(STOP_S), faster
            pauses[faster].over.set()
            _wait_until_saved(checkpoints, 1)
            for pause in pauses.values():
                pause.over.set()
            thread.join(STOP_S)
            assert not thread.is_alive(), faster
        if faster == "periodic":  # else it was given up, and has no end
            checkpoints.settle()
        assert _folders(checkpoints) == ["step_000001"], faster
        assert not _differing(trained, _load(checkpoints, model)), faster


def test_a_stop_with_a_write_in_flight(tiny_model: Path, tmp_path: Path) -> None:
    """The newest finished step wins: that of the write, or one that was finished since."""
    run_ranks(_stop_in_flight, 1, tiny_model, tmp_path)


def _stop_in_flight(model: Path, out: Path) -> None:
    for newest in (1, 2):
        engine = _engine(model)
        checkpoints, rescue = _run(engine, out / str(newest))
        with _slow_writes() as pauses:
            checkpoints.save(engine, Progress(step=1))
            if newest == 1:
                trained = sent_weights(engine)
            # the second step's only update; the step itself may be finished or not
            engine.update(mine(engine), LOSS)
            if newest == 2:
                trained = sent_weights(engine)
                rescue.finish_step(Progress(step=1), {})
                pauses["rescue"].over.set()
            rescue._main_failed.set()  # it is not waited for
            thread = threading.Thread(target=rescue.rescue, args=("SIGTERM",))
            thread.start()
            if newest == 1:
                time.sleep(0.5)
                assert thread.is_alive()  # it waits for what is in flight
                pauses["periodic"].over.set()
            thread.join(STOP_S)
            assert not thread.is_alive(), newest
            pauses["periodic"].over.set()
        assert _folders(checkpoints) == [f"step_{newest:06d}"], newest
        assert not _differing(trained, _load(checkpoints, model, step=newest)), newest


class Pause:
    """Hold up one of the two writers before it begins."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()


@contextmanager
def _slow_writes() -> Iterator[Mapping[str, Pause]]:
    pauses = {"rescue": Pause(), "periodic": Pause()}
    stock_write = Snapshot.write

    def write(snapshot: Snapshot, folder: Path, given_up: threading.Event | None = None) -> None:
        pause = pauses["rescue" if folder.name.endswith("_rescue") else "periodic"]
        pause.begun.set()
        assert pause.over.wait(STOP_S)
        stock_write(snapshot, folder, given_up)

    with patch.object(Snapshot, "write", write):
        yield pauses


def _wait_until_saved(checkpoints: Checkpoints, step: int) -> None:
    deadline = time.monotonic() + STOP_S
    while checkpoints.saved_step != step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _folders(checkpoints: Checkpoints) -> list[str]:
    """Return the names of whole and torn checkpoints."""
    return sorted(
        path.name
        for path in checkpoints.folder.iterdir()
        if not path.name.startswith(".ranks") and path.is_dir()
    )


def _engine(model: Path) -> Engine:
    """Build an engine whose policy, average and reference are three different things."""
    engine = build(model, {}, backend="veomni", keep_reference=True, average_decay=0.25)
    engine.update(mine(engine), LOSS)
    return engine


def _run(engine: Engine, folder: Path) -> tuple[Checkpoints, Rescue]:
    """Return checkpoints and rescue of a run that has just finished its first step."""
    checkpoints = Checkpoints(folder, engine.config, engine.mesh)
    progress = Progress()
    board = Board(checkpoints.folder / ".ranks-test", rank=0, world_size=1)
    board.lay_out()
    rescue = Rescue(engine, checkpoints, board, progress)
    rescue.finish_step(progress, {})
    return checkpoints, rescue


def _load(checkpoints: Checkpoints, model: Path, *, step: int = 1) -> dict[str, Tensor]:
    """Return the policy's weights of a run that is resumed from the newest checkpoint."""
    resumed = _engine(model)
    again = Checkpoints(checkpoints.folder.parent, resumed.config, resumed.mesh)
    assert again.load(resumed, lambda prompts: None).step == step
    return sent_weights(resumed)


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name in first if not torch.equal(first[name], second[name])]
