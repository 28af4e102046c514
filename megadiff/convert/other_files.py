"""The files of a model folder that a conversion copies: all but the trained components' weights.

What DST gets must be what SRC holds. So a link is followed where it leads to a file within SRC, or
within the blobs of the Hugging Face cache that SRC is a snapshot of, which stores all files so.
Other links would copy files into DST that nobody knows to be there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILES = 100_000  # a model folder has some dozens


@dataclass(frozen=True, kw_only=True)
class OtherFiles:
    """Paths within a folder: files and folders, each after the folder that holds it."""

    root: Path
    files: tuple[Path, ...]
    folders: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum((self.root / path).stat().st_size for path in self.files)

    def copy_to(self, folder: Path) -> None:
        """Copy all into an existing folder. Raises OSError."""
        for path in self.folders:
            (folder / path).mkdir(exist_ok=True)
        for path in self.files:
            # With its times, as `cp -p`; links give the file that they lead to.
            shutil.copy2(self.root / path, folder / path)


def other_files(root: Path, *, is_left_out: Callable[[Path], bool]) -> OtherFiles:
    """Find what is copied. is_left_out: tells it of a path within root.

    Raises ValueError that names what is neither file nor folder, and a link that is not followed.
    """
    # SRC itself may be a link, and targets are compared as what they resolve to.
    real_root = root.resolve()
    allowed = [real_root, *_blobs(real_root)]

    files: list[Path] = []
    folders: list[Path] = []
    for path in _walk(real_root):
        relative = path.relative_to(real_root)
        if is_left_out(relative):
            continue
        if path.is_symlink():
            _check_link(root / relative, allowed)
        if path.is_dir():
            folders.append(relative)
        elif path.is_file():
            files.append(relative)
        else:
            raise ValueError(
                f"{root / relative} is neither a file nor a folder, and cannot be copied; remove it"
            )
        if len(files) + len(folders) > MAX_FILES:
            raise ValueError(f"{root} holds more than {MAX_FILES} files; name a model folder")
    return OtherFiles(root=root, files=tuple(files), folders=tuple(folders))


def _walk(root: Path) -> Iterator[Path]:
    """Yield all entries, each folder before what it holds; links to folders are not entered."""

    def refuse(error: OSError) -> None:
        # os.walk() alone would leave such a folder out, and the copy would lack it.
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}; fix that") from error

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        # Sorted, so that two runs name the same first problem.
        subfolders.sort()
        for name in sorted(subfolders + files):
            yield Path(folder, name)


def _check_link(link: Path, allowed: list[Path]) -> None:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop
        raise ValueError(
            f"{link} is a link to nothing; restore what it leads to, or remove it"
        ) from error

    if target.is_dir():
        # It may lead to a folder above itself, or double with each such link beside it.
        raise ValueError(
            f"{link} is a link to the folder {target}, and links to folders are not followed; put "
            "a copy in its place (cp -rL), or remove it"
        )

    if not any(target.is_relative_to(folder) for folder in allowed):
        raise ValueError(
            f"{link} is a link to {target}, outside of what is converted; put the file itself "
            "there if it is to be copied (cp -L), or remove the link"
        )


def _blobs(real_root: Path) -> list[Path]:
    """Return where the Hugging Face cache that the folder is in keeps its files.

    A snapshot is <cache>/models--<owner>--<name>/snapshots/<revision>, with links to ../../blobs/….
    """
    for snapshots in real_root.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return [repository / "blobs"]
    return []
