"""Read and write what lies beside a checkpoint's weights, and choose a run's checkpoint.

runs/<name>/checkpoints/step_000010/{rank_00000.safetensors, …, progress.json, config.yaml}
progress.json is sealed and holds digests of the other files: a checkpoint is these and no others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import yaml

from megadiff import __version__
from megadiff.observe.step_folders import step_folder, step_folders
from megadiff.tensors.model_files import parse_json
from megadiff.tensors.seals import SEAL_KEY, UNSEALED, check_seal, digest, sealed
from megadiff.tensors.shards import SHARD_SUFFIX
from megadiff.tensors.tensor_file import header_of
from megadiff.types import Progress

PROGRESS = "progress.json"
CONFIG = "config.yaml"


def whole_looking(folder: Path) -> list[Path]:
    """Return the checkpoint folders that were renamed into place, oldest first.

    A copy of the user's, as step_000010_best, is none: it would be resumed from, and removed.
    """
    return [path for _, path in step_folders(folder)]


def resume_candidates(folder: Path, resume: str) -> list[Path]:
    """Return the checkpoints that a start may go on from, the best first.

    folder: of the run's own checkpoints. resume: the config's checkpoint.resume.
    """
    if resume == "never":
        return []
    if resume != "auto":
        return [Path(resume)]
    return whole_looking(folder)[::-1]


def fresh_folder(folder: Path) -> None:
    """Make an empty folder in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def is_checkpoint(folder: Path) -> bool:
    return (folder / PROGRESS).is_file()


def chosen_checkpoint(run: Path, *, step: int | None) -> Path:
    """Return a run's checkpoint of a step; its newest for None.

    Raises ValueError that names those there are.
    """
    folders = whole_looking(run / "checkpoints")
    if not folders:
        raise ValueError(f"{run}/checkpoints holds no checkpoint (step_…)")

    if step is None:
        return folders[-1]
    chosen = step_folder(run / "checkpoints", step)
    if chosen not in folders:
        names = ", ".join(folder.name for folder in folders)
        raise ValueError(f"{run} has no checkpoint of step {step}, but {names}")
    return chosen


def progress_record(folder: Path, progress: Progress) -> bytes:
    """Return the text of progress.json: where the run stood, and digests of the folder's files."""
    # a try before this one may have left the record itself
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != PROGRESS]
    record = {
        **asdict(progress),
        "megadiff": __version__,
        "sizes": {path.name: path.stat().st_size for path in files},
        "digests": {path.name: _file_digest(path) for path in files},
        # Filled in by sealed(): it is a digest of the text that it stands in.
        SEAL_KEY: UNSEALED,
    }
    return sealed(json.dumps(record, indent=1).encode())


class _OtherVersion(ValueError):
    """A file that is whole, but not of this version."""


def read_progress(folder: Path) -> Progress:
    """Read where the run stood. Raise ValueError when any file is not as it was written.

    Of shard files the headers are compared here; fingerprints in those cover the rest, on reading.
    """
    record = folder / PROGRESS
    if not record.is_file():
        raise ValueError(f"{record} is missing")

    try:
        text = record.read_bytes()
        saved = parse_json(text)
        if SEAL_KEY not in saved:
            raise _OtherVersion(
                f"{record} was written by another version of megadiff, before checkpoints were "
                "sealed; use that version"
            )
        check_seal(text, record, what="it")
        progress = Progress(**{field.name: saved[field.name] for field in fields(Progress)})
        sizes = dict(saved["sizes"])
        digests = dict(saved["digests"])
    # It is a ValueError too, and the next clause would call the file corrupt.
    except _OtherVersion:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{record} is corrupt: {error!r}") from error

    for name, size in sizes.items():
        path = folder / name
        size_now = path.stat().st_size if path.is_file() else None
        # The size first: it tells a file that was cut from one with other bytes.
        if size_now != size:
            problem = "is missing" if size_now is None else f"has {size_now} bytes"
            raise ValueError(f"{path} {problem}, {size} were written")
        digest_now = _file_digest(path)
        if digest_now != digests[name]:
            raise ValueError(
                f"{path} has the digest {digest_now}, {PROGRESS} says {digests[name]}; it is "
                "corrupt or of another checkpoint, use the one before"
            )
    return progress


def _file_digest(path: Path) -> str:
    """Return a file's digest, of a shard file its header's. Raise ValueError for a torn header."""
    try:
        with path.open("rb") as file:
            is_shard_file = path.suffix == SHARD_SUFFIX
            # Not all of a shard file, which may have many gigabytes.
            return digest(header_of(file.fileno()) if is_shard_file else file.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read, or its header is corrupt: {error}") from error


def read_config(checkpoint: Path) -> dict:
    """Read the config of the run that wrote the checkpoint. Raises ValueError for none."""
    path = checkpoint / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a mapping of config keys")
    return config


def model_path(checkpoint: Path) -> Path:
    """Return model.path of the run that wrote the checkpoint. Raises ValueError when it is gone."""
    try:
        path = Path(read_config(checkpoint)["model"]["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{checkpoint / CONFIG} names no model.path ({error}); name the model folder with "
            "--base"
        ) from error

    if not path.is_dir():
        raise ValueError(
            f"{checkpoint} was trained from {path}, which is not there; name the model folder with "
            "--base"
        )
    return path


def merged_config(
    config: Mapping[str, object], changes: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """Return a config with some keys of some sections changed."""
    merged = dict(config)
    for section, values in changes.items():
        before = merged.get(section)
        merged[section] = {**(before if isinstance(before, dict) else {}), **values}
    return merged
