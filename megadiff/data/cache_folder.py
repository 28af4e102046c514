"""Keep a cache in a folder named by what it was made from. It is whole once it has its name."""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megadiff.data.prompts import digest_of, parse_json
from megadiff.data.row_files import write_json

logger = logging.getLogger(__name__)

FORMAT = 2  # raised when the same data and model give other numbers or files
INDEX = "index.json"
ASIDE = ".writing_"
STALE_S = 6 * 3600.0  # a folder aside that nothing was written to for so long belongs to nobody


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Name all that the cached numbers depend on.

    images, model: fingerprints. dtype: of the text encoder and the embeddings.
    """

    images: str
    num_images: int
    model: str
    height: int
    width: int
    dtype: str
    format: int = FORMAT

    @property
    def name(self) -> str:
        return digest_of(json.dumps(asdict(self)), size=8)


def is_whole(cache: Path) -> bool:
    """Say whether there is such a cache and its files have the sizes they were written with."""
    if not cache.is_dir():
        return False

    try:
        sizes = read_json(cache / INDEX)["files"]
        torn = [name for name, size in sizes.items() if (cache / name).stat().st_size != size]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        torn = [str(error)]
    if torn:
        logger.warning("%s is torn (%s) and is made again", cache, ", ".join(torn))
    return not torn


def make_aside(aside: Path, num_bytes: int) -> None:
    """Make the folder, and remove what runs that were killed have left beside it.

    Raises ValueError when fewer than num_bytes are free there.
    """
    aside.parent.mkdir(parents=True, exist_ok=True)
    for other in aside.parent.glob(f"{ASIDE}*"):
        if time.time() - _last_change(other) > STALE_S:
            shutil.rmtree(other)

    free = shutil.disk_usage(aside.parent).free
    if num_bytes > free:
        raise ValueError(
            f"{aside.parent} has {free / 2**20:.1f} MiB free, the latents need "
            f"{num_bytes / 2**20:.1f} MiB: make room"
        )
    aside.mkdir()


def _last_change(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # the run that writes it has just finished it
        return time.time()


def finish(aside: Path, folder: Path, key: CacheKey) -> None:
    """Give the folder its name. A whole one that another run has finished meanwhile stays."""
    # Parts of captions.json, which only the ranks that wrote it needed.
    for file in aside.glob("captions_*.json"):
        file.unlink()
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    write_json(aside / INDEX, {"key": asdict(key), "files": sizes})

    cache = folder / key.name
    if is_whole(cache):
        shutil.rmtree(aside)
        return
    if cache.exists():
        shutil.rmtree(cache)
    aside.rename(cache)


def read_json(path: Path) -> Any:
    """Return the JSON value of a file. Raises ValueError, with the path, where it is none."""
    return parse_json(path, path.read_text("utf-8"))
