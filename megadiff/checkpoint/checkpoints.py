"""Atomic checkpoints: written aside, fingerprinted, renamed, then `latest` moved.

checkpoints/step_000010/{rank_00000.safetensors, …, progress.json, config.yaml}
checkpoints/latest      the name of the newest whole one, which is noticed when it goes missing

A torn checkpoint is named and skipped.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megadiff.checkpoint.base_weights import base_fingerprint, tensor_fingerprints
from megadiff.checkpoint.run_folders import (
    CONFIG,
    PROGRESS,
    progress_record,
    read_progress,
    whole_looking,
)
from megadiff.config.load import save_config
from megadiff.config.schema import Config
from megadiff.engines.base import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.observe.step_folders import step_folder, step_name
from megadiff.parallel.collectives import AgreedError, agreed, broadcast_json, gather_json
from megadiff.parallel.mesh import Mesh
from megadiff.process.whole_folder import sync_entry
from megadiff.tensors.model_files import weight_files
from megadiff.tensors.shards import shard_file
from megadiff.types import Progress

logger = logging.getLogger(__name__)
# Hidden, and unlike step_*: whole_looking() never sees a folder that is being written.
ASIDE = ".writing_"
GIVEN_UP = "given_up_"  # nothing deletes these: they may be the better history
LATEST = "latest"


class CheckpointError(AgreedError):
    """A checkpoint could not be written; on every rank."""


class Checkpoints:
    """The checkpoints of one run folder. save() and load() are collective over the world."""

    def __init__(
        self, run_folder: Path, config: Config, mesh: Mesh, *, base: Mapping[str, str] | None = None
    ) -> None:
        """base: as base_weights() has it."""
        self.folder = run_folder / "checkpoints"
        self.config = config
        self.mesh = mesh
        self.saved_step = 0
        self._finishing = threading.Lock()  # a rescue's thread may save while save() does
        self._aside: set[Path] = set()  # what either of them writes at the moment
        self._base = dict(base or {})

    def save(self, engine: Engine, progress: Progress) -> Path:
        """Write the checkpoint of progress.step.

        Raises CheckpointError, e.g. for a full disk; earlier checkpoints stay whole.
        """
        target = self.folder_of(progress.step)
        aside = self.aside_of(progress.step)
        group = self.mesh.cpu_group
        is_first = self.mesh.rank == 0
        self._aside.add(aside)

        try:
            agreed(lambda: _fresh_folder(aside), group, here=is_first)
            agreed(lambda: engine.save(aside), group)
            # After all ranks agreed: before that some files may be half written.
            agreed(lambda: self._finish(aside, target, progress), group, here=is_first)
        except AgreedError as error:
            if is_first:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {target} could not be written, earlier ones are whole: {error}"
            ) from error

        self.saved_step = progress.step
        return target

    def folder_of(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def aside_of(self, step: int, *, rescue: bool = False) -> Path:
        """Return where a checkpoint is written before it is renamed; a rescue's is its own."""
        return self.folder / f"{ASIDE}{step_name(step)}{'_rescue' if rescue else ''}"

    def complete(self, aside: Path, progress: Progress) -> None:
        """Turn the ranks' files of a rescue into a checkpoint, on rank 0 alone."""
        self._aside.add(aside)
        self._finish(aside, self.folder_of(progress.step), progress)

    def load(
        self, engine: Engine, load_prompts: Callable[[dict[str, int | str]], None]
    ) -> Progress:
        """Continue from the newest checkpoint that loads.

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
                progress = self._load_one(folder, engine)
            except AgreedError as error:
                problems.append(f"{folder.name}: {error}")
                logger.warning(
                    "checkpoint %s does not load (%s); trying the one before", folder, error
                )
                continue

            agreed(lambda: self._check_base(folder, progress), group)  # noqa: B023 (called at once)
            agreed(lambda: load_prompts(progress.prompts), group)  # noqa: B023 (likewise)
            # With accept_changes it goes on over this base, which later checkpoints then name.
            progress.base = self._base
            self.saved_step = progress.step
            logger.info("resumed from %s (step %d)", folder, progress.step)
            return progress

        if problems:
            raise AgreedError(
                f"no checkpoint of {self.folder} loads: {'; '.join(problems)}; restore one, or set "
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
        if not theirs or not ours or theirs["fingerprint"] == ours["fingerprint"]:
            return

        problem = (
            f"{folder} was trained over the weights of {theirs['path']} (fingerprint "
            f"{theirs['fingerprint']}), but model.path={ours['path']} holds others (fingerprint "
            f"{ours['fingerprint']})"
        )
        if not self.config.checkpoint.accept_changes:
            raise ValueError(
                f"{problem}: set model.path to the model it was trained over, start a new run, or "
                "if you mean it set checkpoint.accept_changes=true"
            )
        if self.mesh.rank == 0:
            logger.warning("%s; checkpoint.accept_changes: it goes on over those", problem)

    def _load_one(self, folder: Path, engine: Engine) -> Progress:
        saved = self._from_first(lambda: asdict(read_progress(folder)))
        agreed(lambda: engine.load(folder), self.mesh.cpu_group)
        return Progress(**saved)

    def _from_first(self, read: Callable[[], object]) -> Any:
        """Return on all ranks the JSON value that rank 0 reads. Collective."""
        group = self.mesh.cpu_group
        value = agreed(read, group, here=self.mesh.rank == 0)
        return broadcast_json(value, source=0, group=group)

    def _finish(self, aside: Path, target: Path, progress: Progress) -> None:
        with self._finishing:
            if progress.step > self.saved_step or not self.saved_step:
                self._rename(aside, target, progress)
                self.saved_step = progress.step
            else:  # the other writer was faster
                shutil.rmtree(aside, ignore_errors=True)
            self._aside.discard(aside)

    def _rename(self, aside: Path, target: Path, progress: Progress) -> None:
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
        self._put_away_other_history(progress.step)

        # A rename is atomic: a checkpoint has its name only when all of it is on the disk.
        aside.rename(target)
        sync_entry(self.folder)

        pointer = self.folder / f"{ASIDE}{LATEST}"
        pointer.write_text(target.name, encoding="utf-8")
        sync_entry(pointer)
        # Before old ones go: if this is killed, `latest` never names one that is gone.
        pointer.rename(self.folder / LATEST)

        for old in whole_looking(self.folder)[: -self.config.checkpoint.keep]:
            shutil.rmtree(old)
        # A rescue's thread may be writing now, and its folder is not torn.
        for torn in set(self.folder.glob(f"{ASIDE}step_*")) - self._aside:
            shutil.rmtree(torn, ignore_errors=True)

    def _put_away_other_history(self, step: int) -> None:
        """Rename checkpoints of this step and later ones.

        They are of a run that was given up: resumed from an earlier step, or started over.
        """
        for folder in whole_looking(self.folder):
            if folder.name >= step_name(step):
                logger.warning(
                    "%s belongs to another history of this run and is kept as %s*", folder, GIVEN_UP
                )
                folder.rename(self.folder / f"{GIVEN_UP}{folder.name}_{time.time_ns()}")

    def _candidates(self) -> list[str]:
        """Return the checkpoint folders to try, the best first."""
        resume = self.config.checkpoint.resume
        if resume == "never":
            return []
        if resume != "auto":
            return [resume]
        folders = whole_looking(self.folder)
        self._check_latest(folders)
        return [str(folder) for folder in reversed(folders)]

    def _check_latest(self, folders: Sequence[Path]) -> None:
        """Raise ValueError when `latest` names a checkpoint that is newer than all there are.

        Going on from an older one would hide the loss.
        """
        pointer = self.folder / LATEST
        if not pointer.is_file():
            return
        name = pointer.read_bytes().decode("utf-8", errors="replace")
        newest = folders[-1].name if folders else "none"
        if not re.fullmatch(r"step_[0-9]{6,}", name):
            raise ValueError(
                f"{pointer} is corrupt, it holds {name!r:.100}; remove it to go on from the "
                f"newest, {newest}"
            )

        was_given_up = any(self.folder.glob(f"{GIVEN_UP}{name}_*"))  # killed before `latest` moved
        if was_given_up or any(folder.name >= name for folder in folders):
            return
        raise ValueError(
            f"{pointer} names {name}, which is not there; the newest is {newest}. Restore {name}, "
            f"or remove {pointer} to go on from {newest}"
        )


def base_weights(config: Config, adapter: ModelAdapter, mesh: Mesh) -> dict[str, str]:
    """Return path and fingerprint of the weights that the run takes from model.path. Collective.

    Those are the base under a LoRA, or the reference of a KL term; empty where the run has neither.
    Each rank reads and hashes its part of the files, with one core 4.5 GiB/s from page cache: 40 GB
    take about 1 s on 8 ranks.
    """
    if not config.lora.rank and not config.algorithm.kl_coef:
        return {}

    files = {name: weight_files(adapter.model_folder / name) for name in adapter.components}
    digits = agreed(
        lambda: tensor_fingerprints(files, rank=mesh.rank, world_size=mesh.world_size),
        mesh.cpu_group,
    )

    return {
        "path": str(adapter.model_folder.resolve()),
        "fingerprint": base_fingerprint(gather_json(digits, mesh.cpu_group)),
    }


def _fresh_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
