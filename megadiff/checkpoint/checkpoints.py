"""Atomic checkpoints: copied, written aside, fingerprinted, renamed, then `latest` moved.

checkpoints/step_000010/{rank_00000.safetensors, …, progress.json, config.yaml}
checkpoints/latest      the name of the newest whole one, which is noticed when it goes missing

A torn checkpoint is named and skipped.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any, Protocol

from megadiff.checkpoint.background import CopyMemory, RankWrite
from megadiff.checkpoint.base_weights import base_difference
from megadiff.checkpoint.retention import (
    ASIDE,
    check_latest,
    move_latest,
    put_away_other_history,
    remove_old,
)
from megadiff.checkpoint.run_folders import (
    CONFIG,
    PROGRESS,
    fresh_folder,
    progress_record,
    read_progress,
    resume_candidates,
)
from megadiff.config.load import save_config
from megadiff.config.schema import Config
from megadiff.engines.engine import Engine
from megadiff.observe.step_folders import is_due, step_folder, step_name
from megadiff.parallel.collectives import AgreedError, agreed, all_reduce_max, read_once
from megadiff.parallel.mesh import Mesh
from megadiff.process.whole_folder import sync_entry
from megadiff.tensors.shards import shard_file
from megadiff.types import Progress

logger = logging.getLogger(__name__)
LOOK_S = 0.2  # between two looks for the files of all ranks
MOMENT_S = 5.0  # for which a network filesystem may refuse what it grants later


class CheckpointError(AgreedError):
    """A checkpoint could not be written; on every rank."""


class Beside(Protocol):
    """Write files beside the weights of a step, such as the samples of the next one."""

    def settle(self) -> None:
        """Wait until all ranks can write. Collective."""

    def writer(self, step: int) -> Callable[[Path], None] | None:
        """Return what writes this rank's files after `step` steps, None where it has none.

        Not collective. What it writes does not change any more: it may run in a thread, and later.
        """

    def drop_incomplete(self, folder: Path, step: int) -> None:
        """Remove the files, on rank 0, where a rescue could not write those of all ranks."""


class Checkpoints:
    """The checkpoints of one run folder. after_step(), save(), settle() and load() are collective.

    saved_step: of the newest whole one. resumed_from: what load() went on from, None where it began
    at step 0. in_flight: this rank's part of the next one, None where no rank has begun. beside:
    what they hold beside the weights, where that is anything.
    """

    def __init__(
        self, run_folder: Path, config: Config, mesh: Mesh, *, base: Mapping[str, str] | None = None
    ) -> None:
        """base: as base_weights() has it."""
        self.folder = run_folder / "checkpoints"
        self.config = config
        self.mesh = mesh
        self.saved_step = 0
        self.resumed_from: Path | None = None
        self.write_s = 0.0  # that this rank's part of the newest one took
        self.in_flight: RankWrite | None = None
        self.beside: Beside | None = None
        self._began_s = time.monotonic()  # the newest one, or this attempt of the run
        self._memory = CopyMemory(mesh.device)
        self._finishing = threading.Lock()  # of the loop, a rescue and _complete_early()
        self._aside: set[Path] = set()  # what any of them writes at the moment
        self._base = dict(base or {})

    def after_step(self, engine: Engine, progress: Progress) -> None:
        """Save the step if a checkpoint is due, and tell how the one in flight ended.

        Raises CheckpointError for that one.
        """
        settings = self.config.checkpoint
        self._settle_if_written()
        num_steps = self.config.train.num_steps
        saves = is_due(settings.every, progress.step, num_steps=num_steps)
        if settings.every_min:
            # Rank 0's clock: others' may say something else at this step.
            minutes = (time.monotonic() - self._began_s) / 60
            is_late = float(self.mesh.rank == 0 and minutes >= settings.every_min)
            saves |= bool(all_reduce_max({"is_late": is_late}, self.mesh.cpu_group)["is_late"])
        if saves:
            self.save(engine, progress)

    def save(self, engine: Engine, progress: Progress) -> None:
        """Copy the checkpoint of progress.step; it is written while training goes on.

        It waits for one that is in flight, and raises CheckpointError as settle() does. Where the
        host has no memory for a copy, it returns when all is written. Raises AgreedError where what
        belongs beside the weights has failed.
        """
        self.settle_beside()
        self.settle()
        self._began_s = time.monotonic()
        write = RankWrite(progress, self.aside_of(progress.step))
        self._aside.add(write.aside)
        is_first = self.mesh.rank == 0
        with self._telling(write):
            agreed(lambda: fresh_folder(write.aside), self.mesh.cpu_group, here=is_first)

        # Every rank has come here, so a rescue may count on every rank's part.
        self.in_flight = write
        beside = self.beside.writer(progress.step) if self.beside else None
        write.start(engine.snapshot, self._memory, beside)
        if is_first:
            threading.Thread(target=self._complete_early, args=(write,), daemon=True).start()
        self._settle_if_written()  # at once where there was no memory for copies

    def settle_beside(self) -> None:
        """Wait for what belongs beside the weights. Collective."""
        if self.beside:
            self.beside.settle()

    def settle(self) -> None:
        """Complete the checkpoint in flight, if there is one, when all ranks have written it.

        Raises CheckpointError, e.g. for a full disk; earlier checkpoints stay whole.
        """
        write = self.in_flight
        if write is None:
            return
        group = self.mesh.cpu_group
        with self._telling(write):
            agreed(write.wait, group)
            agreed(lambda: self._finish_patiently(write), group, here=not self.mesh.rank)
        self.in_flight = None
        self.write_s = write.seconds
        if self.mesh.rank:  # rank 0 has said so itself, unless a rescue has given it up
            self.saved_step = write.progress.step

    def _settle_if_written(self) -> None:
        if self.in_flight:
            is_writing = {"is_writing": float(not self.in_flight.has_ended)}
            if not all_reduce_max(is_writing, self.mesh.cpu_group)["is_writing"]:
                self.settle()

    @contextmanager
    def _telling(self, write: RankWrite) -> Iterator[None]:
        """Remove what was written, and raise CheckpointError for AgreedError."""
        try:
            yield
        except AgreedError as error:
            self.in_flight = None
            with self._finishing:  # not while _complete_early() renames it
                self._drop(write.aside)
            raise CheckpointError(
                f"checkpoint {self.folder_of(write.progress.step)} could not be written, earlier "
                f"ones are whole: {error}"
            ) from error

    def _complete_early(self, write: RankWrite) -> None:
        """Rename the checkpoint as soon as rank 0 sees every rank's file; runs in a thread.

        A file has its name when it is whole and on the disk, so this takes no collective. The next
        end of a step may be minutes away, and a rank may be killed before.
        """
        files = {shard_file(write.aside, rank).name for rank in range(self.mesh.world_size)}
        while write.aside in self._aside:
            try:
                # a listing: over NFS a name that is asked for too early stays unseen for a minute
                if files <= set(os.listdir(write.aside)):
                    self._finish(write.aside, write.progress)
                    return
            except FileNotFoundError:
                return  # the folder was removed; settle() tells
            except (OSError, ValueError) as error:
                # a network filesystem has its moments; settle() tells what lasts
                logger.debug("%s is not complete yet: %s", write.aside, error)
            time.sleep(LOOK_S)

    def _finish_patiently(self, write: RankWrite) -> None:
        """Rename the checkpoint, and try again where a network filesystem has its moments."""
        deadline = time.monotonic() + MOMENT_S
        while True:
            try:
                return self._finish(write.aside, write.progress)
            except (OSError, ValueError) as error:
                is_full = isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT)
                if is_full or time.monotonic() > deadline:
                    raise
                logger.warning("%s cannot be completed yet: %s", write.aside, error)
            time.sleep(LOOK_S)

    def folder_of(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def aside_of(self, step: int, *, rescue: bool = False) -> Path:
        """Return where a checkpoint is written before it is renamed; a rescue's is its own."""
        return self.folder / f"{ASIDE}{step_name(step)}{'_rescue' if rescue else ''}"

    def begin_rescue(self, step: int) -> Path:
        """Return the folder for a rescue's files, in place of those in flight. Not collective."""
        self._give_up()
        aside = self.aside_of(step, rescue=True)
        self._aside.add(aside)
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def save_beside(self, aside: Path, step: int) -> None:
        """Write for a rescue what this rank has beside the weights by now. Not collective."""
        write = self.beside.writer(step) if self.beside else None
        try:
            if write:
                write(aside)
        except OSError as error:  # the weights are there, and count for more
            logger.warning("%s: what belongs beside the weights is missing: %s", aside, error)

    def complete(self, aside: Path, progress: Progress) -> None:
        """Turn the ranks' files of a rescue into a checkpoint, on rank 0 alone."""
        # Else it has its name already: whoever wrote all of it was faster.
        if self.beside and aside in self._aside:
            self.beside.drop_incomplete(aside, progress.step)
        self._finish(aside, progress)
        self._give_up()

    def _give_up(self) -> None:
        with self._finishing:  # not while it is renamed
            write = self.in_flight
            if write and write.aside in self._aside:
                write.give_up()
                self._drop(write.aside)

    def _drop(self, aside: Path) -> None:
        """Let nobody complete a checkpoint, and remove what was written of it."""
        self._aside.discard(aside)
        if self.mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)

    def load(
        self,
        engine: Engine,
        load_prompts: Callable[[dict[str, int | str]], None],
        load_beside: Callable[[Path], None] = lambda folder: None,
    ) -> Progress:
        """Continue from the newest checkpoint that loads.

        load_beside: reads from a checkpoint's folder what this rank needs beside the weights.
        Starts at step 0 where there is none, or resume is `never`. Raises AgreedError when there
        are checkpoints and none of them loads: starting over would hide the loss. Also for one over
        another base (unless checkpoint.accept_changes is set), and for one of other data, which
        load_prompts refuses.
        """
        group = self.mesh.cpu_group
        # rank 0 decides: on a shared filesystem the others may see older folders
        problems = []
        for folder in map(Path, self._from_first(self._candidates)):
            try:
                progress = self._load_one(folder, engine, load_beside)
            except AgreedError as error:
                problems.append(f"{folder}: {error}")
                logger.warning(
                    "checkpoint %s does not load (%s); trying the one before", folder, error
                )
                continue

            agreed(lambda: self._check_base(folder, progress), group)  # noqa: B023 (called at once)
            agreed(lambda: load_prompts(progress.prompts), group)  # noqa: B023 (likewise)
            # With accept_changes it goes on over this base, which later checkpoints then name.
            progress.base = self._base
            self.saved_step = progress.step
            self.resumed_from = folder
            logger.info("resumed from %s (step %d)", folder, progress.step)
            return progress

        if problems:
            raise AgreedError(
                f"no checkpoint of this run loads: {'; '.join(problems)}; restore one, or set "
                "checkpoint.resume=never to start over"
            )
        return Progress(base=self._base)

    def _check_base(self, folder: Path, progress: Progress) -> None:
        """Raise ValueError when the weights belong to another base than the run has.

        A run that needs no base has none; converted files say nothing of theirs.
        """
        theirs = progress.base
        ours = self._base
        if ours and not theirs and progress.step and self.mesh.rank == 0:
            logger.warning("%s does not say over which base it was trained", folder)
        difference = base_difference(theirs, ours)
        if not difference:
            return

        problem = f"{folder} {difference}"
        if not self.config.checkpoint.accept_changes:
            raise ValueError(
                f"{problem}: set model.path to the model it was trained over, start a new run, or "
                "if you mean it set checkpoint.accept_changes=true"
            )
        if self.mesh.rank == 0:
            logger.warning("%s; checkpoint.accept_changes: it goes on over those", problem)

    def _load_one(
        self, folder: Path, engine: Engine, load_beside: Callable[[Path], None]
    ) -> Progress:
        saved = self._from_first(lambda: asdict(read_progress(folder)))
        agreed(lambda: engine.load(folder), self.mesh.cpu_group)
        agreed(lambda: load_beside(folder), self.mesh.cpu_group)
        return Progress(**saved)

    def _from_first(self, read: Callable[[], object]) -> Any:
        """Return on all ranks the JSON value that rank 0 reads. Collective."""
        group = self.mesh.cpu_group
        return read_once(read, source=0, group=group, world=group)

    def _finish(self, aside: Path, progress: Progress) -> None:
        """Rename the folder, unless that has been done, or it was given up."""
        with self._finishing:
            if aside not in self._aside:
                return
            if self.saved_step and progress.step <= self.saved_step:
                self._drop(aside)  # the other writer was faster
                return

            self._seal(aside, progress)
            put_away_other_history(self.folder, progress.step)
            # A rename is atomic: a checkpoint has its name only when all of it is on the disk.
            aside.rename(self.folder_of(progress.step))
            # At once: whatever fails from here on, the checkpoint is whole.
            self.saved_step = progress.step
            self._aside.discard(aside)
            self._remove_others(progress.step)

    def _seal(self, aside: Path, progress: Progress) -> None:
        """Write what lies beside the ranks' files, and bring it to the disk."""
        save_config(self.config, aside / CONFIG)
        absent = [
            rank for rank in range(self.mesh.world_size) if not shard_file(aside, rank).is_file()
        ]
        if absent:
            raise ValueError(
                f"rank 0 does not see what ranks {absent} wrote; run.dir must be on a filesystem "
                "that all nodes share"
            )

        # Last, as it holds digests of all other files.
        (aside / PROGRESS).write_bytes(progress_record(aside, progress))
        # On the disk before the rename: else a power cut could leave the name without its content.
        sync_entry(aside / CONFIG)
        sync_entry(aside / PROGRESS)
        sync_entry(aside)

    def _remove_others(self, step: int) -> None:
        """Move `latest` to the checkpoint that was renamed, and remove older ones."""
        try:
            sync_entry(self.folder)
        except OSError as error:
            # Older ones stay, as a power cut could take the new name.
            logger.warning("the name of %s may not be on the disk: %s", self.folder_of(step), error)
            return
        # Before old ones go: if this is killed, `latest` never names one that is gone.
        move_latest(self.folder, step_name(step))
        remove_old(self.folder, keep=self.config.checkpoint.keep)

    def _candidates(self) -> list[str]:
        """Return the checkpoint folders to try, the best first."""
        resume = self.config.checkpoint.resume
        if resume == "auto":
            check_latest(self.folder)
        return list(map(str, resume_candidates(self.folder, resume)))
