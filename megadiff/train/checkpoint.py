"""Atomic checkpoints: written aside, checksummed, renamed, then `latest` moved. A torn one is named and skipped.

    checkpoints/step_000010/{rank_00000.safetensors, …, progress.json, config.yaml, sums/rank_00000.json, …}
    checkpoints/latest                      the name of the newest whole one
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from megadiff import __version__
from megadiff.config.load import save_config
from megadiff.config.schema import Config
from megadiff.engines.base import Engine
from megadiff.parallel.collectives import AgreedError, broadcast_json, raise_together
from megadiff.parallel.mesh import Mesh
from megadiff.types import Progress

logger = logging.getLogger(__name__)
ASIDE = ".writing_"
HASH_CHUNK = 1 << 24


class Checkpoints:
    """The checkpoints of one run folder. save() and load() are collective over the world."""

    def __init__(self, run_folder: Path, config: Config, mesh: Mesh) -> None:
        self.folder, self.config, self.mesh = run_folder / "checkpoints", config, mesh
        self.saved_step = 0

    def save(self, engine: Engine, progress: Progress) -> Path:
        """Write the checkpoint of progress.step. Raises AgreedError (e.g. a full disk); earlier ones stay whole."""
        target, aside = self.folder / step_name(progress.step), self.folder / f"{ASIDE}{step_name(progress.step)}"
        self._together(lambda: _fresh_folder(aside), only_rank_0=True)
        try:
            self._together(lambda: self._write_shards(engine, aside))
            self._together(lambda: self._finish(aside, target, progress), only_rank_0=True)
        except AgreedError as error:
            if self.mesh.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise AgreedError(f"checkpoint {target} could not be written, earlier ones are whole: {error}") from error
        self.saved_step = progress.step
        return target

    def load(self, engine: Engine, load_prompts: Callable[[dict[str, int]], None]) -> Progress:
        """Continue from the newest whole checkpoint, or start at step 0 where there is none (or resume is `never`)."""
        folder, problem = None, None
        if self.mesh.rank == 0:
            try:
                folder = self._choose()
            except ValueError as error:
                problem = error
        raise_together(problem, self.mesh.cpu_group)
        name = broadcast_json(str(folder) if folder else "", source=0, group=self.mesh.cpu_group)
        if not name:
            return Progress()
        folder = Path(str(name))
        saved = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        self._together(lambda: engine.load(folder))
        self._together(lambda: load_prompts(saved["prompts"]))
        self.saved_step = saved["step"]
        logger.info("resumed from %s (step %d)", folder, saved["step"])
        return Progress(step=saved["step"], prompts=saved["prompts"])

    def _together(self, action: Callable[[], object], *, only_rank_0: bool = False) -> None:
        """Run the action (everywhere, or on rank 0) and agree on its failure."""
        error: Exception | None = None
        if self.mesh.rank == 0 or not only_rank_0:
            try:
                action()
            except (OSError, ValueError, RuntimeError) as failure:
                error = failure
        raise_together(error, self.mesh.cpu_group)

    def _write_shards(self, engine: Engine, aside: Path) -> None:
        engine.save(aside)
        mine = sorted(aside.glob(f"rank_{self.mesh.rank:05d}*"))
        sums = {path.name: [path.stat().st_size, file_hash(path)] for path in mine}
        _write_synced(aside / "sums" / f"rank_{self.mesh.rank:05d}.json", json.dumps(sums))

    def _finish(self, aside: Path, target: Path, progress: Progress) -> None:
        save_config(self.config, aside / "config.yaml")
        record = {**asdict(progress), "world_size": self.mesh.world_size, "megadiff": __version__}
        _write_synced(aside / "progress.json", json.dumps(record, indent=1))
        for path in aside.rglob("*"):
            _sync(path)
        if target.exists():  # the same step saved again: an interrupted run that came here once more
            shutil.rmtree(target)
        aside.rename(target)
        _sync(self.folder)
        pointer = self.folder / f"{ASIDE}latest"
        _write_synced(pointer, target.name)
        pointer.rename(self.folder / "latest")
        for old in whole_looking(self.folder)[: -self.config.checkpoint.keep]:
            shutil.rmtree(old)
        for torn in self.folder.glob(f"{ASIDE}step_*"):
            shutil.rmtree(torn, ignore_errors=True)

    def _choose(self) -> Path | None:
        resume = self.config.checkpoint.resume
        if resume == "never":
            return None
        if resume != "auto":
            problem = damage(Path(resume))
            if problem:
                raise ValueError(f"checkpoint.resume={resume}: {problem}")
            return Path(resume)
        for folder in reversed(whole_looking(self.folder)):
            problem = damage(folder)
            if not problem:
                return folder
            logger.warning("checkpoint %s is damaged (%s); trying the one before", folder, problem)
        return None


def step_name(step: int) -> str:
    """Folder name of a step, sorting by step."""
    return f"step_{step:06d}"


def whole_looking(folder: Path) -> list[Path]:
    """Checkpoint folders that were renamed into place, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def damage(folder: Path) -> str:
    """'' when every file has the size and the hash that were written down, else what is wrong and with which file."""
    record = folder / "progress.json"
    if not record.is_file():
        return "progress.json is missing"
    try:
        world_size = int(json.loads(record.read_text(encoding="utf-8"))["world_size"])
        for rank in range(world_size):
            sums = folder / "sums" / f"rank_{rank:05d}.json"
            for name, (size, digest) in json.loads(sums.read_text(encoding="utf-8")).items():
                path = folder / name
                found = path.stat().st_size
                if found != size:
                    return f"{name} has {found} bytes, {size} were written"
                if file_hash(path) != digest:
                    return f"{name} has other bits than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def file_hash(path: Path) -> str:
    """blake2b of a file's content, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for chunk in _chunks(file.read):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(read: Callable[[int], bytes]) -> Iterable[bytes]:
    while chunk := read(HASH_CHUNK):
        yield chunk


def _fresh_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "sums").mkdir(parents=True)


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file or a folder entry to the disk: a rename must never become durable before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
