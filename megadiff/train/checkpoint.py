"""Atomic checkpoints: written aside, fingerprinted, renamed, then `latest` moved. A torn one is named and skipped.

checkpoints/step_000010/{rank_00000.safetensors, …, progress.json, config.yaml}
checkpoints/latest                      the name of the newest whole one
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megadiff.config.load import save_config
from megadiff.config.schema import Config
from megadiff.engines.base import Engine
from megadiff.parallel.collectives import AgreedError, agreed, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.types import Progress
from megadiff.weights.destination import sync_entry
from megadiff.weights.run_folders import CONFIG, PROGRESS, progress_record, read_progress, step_name, whole_looking
from megadiff.weights.shards import shard_file

logger = logging.getLogger(__name__)
ASIDE = ".writing_"
GIVEN_UP = "given_up_"


class CheckpointError(AgreedError):
    """A checkpoint could not be written; on every rank."""


class Checkpoints:
    """The checkpoints of one run folder. save() and load() are collective over the world."""

    def __init__(self, run_folder: Path, config: Config, mesh: Mesh) -> None:
        self.folder, self.config, self.mesh = run_folder / "checkpoints", config, mesh
        self.saved_step = 0

    def save(self, engine: Engine, progress: Progress) -> Path:
        """Write the checkpoint of progress.step. Raises AgreedError (e.g. a full disk); earlier ones stay whole."""
        target, aside = self.folder_of(progress.step), self.aside_of(progress.step)
        group, is_first = self.mesh.cpu_group, self.mesh.rank == 0
        try:
            agreed(lambda: _fresh_folder(aside), group, here=is_first)
            agreed(lambda: engine.save(aside), group)
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
        return self.folder / step_name(step)

    def aside_of(self, step: int, *, rescue: bool = False) -> Path:
        """Return where a checkpoint is written before it is renamed; a rescue's is its own."""
        return self.folder / f"{ASIDE}{step_name(step)}{'_rescue' if rescue else ''}"

    def complete(self, aside: Path, progress: Progress) -> None:
        """Turn the ranks' files of a rescue into a checkpoint, on rank 0 alone."""
        if progress.step > self.saved_step:
            self._finish(aside, self.folder_of(progress.step), progress)
            self.saved_step = progress.step

    def load(self, engine: Engine, load_prompts: Callable[[dict[str, int]], None]) -> Progress:
        """Continue from the newest checkpoint that loads, or start at step 0 where there is none (or resume is `never`).

        Raises AgreedError when there are checkpoints and none of them loads: starting over would hide the loss.
        """
        candidates = broadcast_json(self._candidates(), source=0, group=self.mesh.cpu_group)
        problems = []
        for folder in map(Path, candidates):  # type: ignore[arg-type]
            try:
                progress = self._load_one(folder, engine)
            except AgreedError as error:
                problems.append(f"{folder.name}: {error}")
                logger.warning("checkpoint %s does not load (%s); trying the one before", folder, error)
                continue
            agreed(lambda: load_prompts(progress.prompts), self.mesh.cpu_group)  # noqa: B023 (called at once)
            self.saved_step = progress.step
            logger.info("resumed from %s (step %d)", folder, progress.step)
            return progress
        if problems:
            raise AgreedError(
                f"no checkpoint of {self.folder} loads: {'; '.join(problems)}; restore one, or set checkpoint.resume=never "
                "to start over"
            )
        return Progress()

    def _load_one(self, folder: Path, engine: Engine) -> Progress:
        group = self.mesh.cpu_group
        progress = agreed(lambda: read_progress(folder), group, here=self.mesh.rank == 0)
        saved = broadcast_json(asdict(progress) if progress else None, source=0, group=group)
        agreed(lambda: engine.load(folder), group)
        return Progress(**saved)  # type: ignore[arg-type]

    def _finish(self, aside: Path, target: Path, progress: Progress) -> None:
        save_config(self.config, aside / CONFIG)
        absent = [rank for rank in range(self.mesh.world_size) if not shard_file(aside, rank).is_file()]
        if absent:
            raise ValueError(
                f"rank 0 does not see what ranks {absent} wrote; run.dir must be on a filesystem that all nodes share"
            )
        _write_synced(aside / PROGRESS, progress_record(aside, progress))
        sync_entry(aside)
        self._put_away_other_history(progress.step)
        aside.rename(target)
        sync_entry(self.folder)
        pointer = self.folder / f"{ASIDE}latest"
        _write_synced(pointer, target.name)
        pointer.rename(self.folder / "latest")
        for old in whole_looking(self.folder)[: -self.config.checkpoint.keep]:
            shutil.rmtree(old)
        for torn in self.folder.glob(f"{ASIDE}step_*"):
            shutil.rmtree(torn, ignore_errors=True)

    def _put_away_other_history(self, step: int) -> None:
        """Checkpoints of this step and later ones are of a run that was given up (resumed from before, or started over)."""
        for folder in whole_looking(self.folder):
            if folder.name >= step_name(step):
                logger.warning("%s belongs to another history of this run and is kept as %s*", folder, GIVEN_UP)
                folder.rename(self.folder / f"{GIVEN_UP}{folder.name}_{time.time_ns()}")

    def _candidates(self) -> list[str]:
        """Checkpoint folders to try, the best first."""
        resume = self.config.checkpoint.resume
        if resume not in ("auto", "never"):
            return [resume]
        return [str(folder) for folder in reversed(whole_looking(self.folder)) if resume == "auto"]


def _fresh_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync_entry(path)
