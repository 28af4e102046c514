"""Keep tensors of very many rows in safetensors files: written as they come, read memory-mapped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megadiff.process.whole_folder import sync_entry

FILE_BYTES = 1 << 30  # rows collected in memory until a file is written
# A file holds one tensor, under this name.
KEY = "rows"


@dataclass
class RowWriter:
    """Write PREFIX_RANK_NUMBER.safetensors: sorted by name, the files hold all rows in order.

    A rank without rows writes no file.
    Raises ValueError, with the free space, when a file cannot be written.
    """

    folder: Path
    prefix: str
    rank: int
    file_bytes: int = FILE_BYTES
    _parts: list[Tensor] = field(default_factory=list, init=False)
    _num_bytes: int = field(default=0, init=False)
    _num_files: int = field(default=0, init=False)

    def add(self, rows: Tensor) -> None:
        """Take rows [n, …], the same … each time; those on a GPU are copied to the CPU."""
        self._parts.append(rows.cpu())
        self._num_bytes += rows.numel() * rows.element_size()
        if self._num_bytes >= self.file_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is left."""
        if self._parts:
            # Padded numbers: names must sort as the rows follow each other.
            name = f"{self.prefix}_{self.rank:05d}_{self._num_files:05d}.safetensors"
            write_tensor(self.folder / name, torch.cat(self._parts))
            self._num_files += 1
        self._parts = []
        self._num_bytes = 0


def write_tensor(path: Path, tensor: Tensor) -> None:
    """Write a tensor, on the disk when this returns.

    Raises ValueError, with the free space, when it cannot be written.
    """
    with _written(path):
        save_file({KEY: tensor.contiguous()}, path)


def write_json(path: Path, value: object) -> None:
    """Write a JSON value, as write_tensor does."""
    with _written(path):
        path.write_text(json.dumps(value), "utf-8")


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
        sync_entry(path)  # a file of the right size must not be empty after a crash
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free / 2**20
        raise ValueError(
            f"{path} could not be written: {error}; {free:.1f} MiB are free there"
        ) from error


def _mapped(path: Path) -> Tensor:
    try:
        return safe_open(path, framework="pt").get_tensor(KEY)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; remove {path.parent}, it is made again"
        ) from error


class RowTable:
    """Read the rows of some files as one tensor that is only indexed. shape, dtype: its own."""

    def __init__(self, paths: list[Path]) -> None:
        """Map the files into memory. Raises ValueError when one cannot be read."""
        self._parts = [_mapped(path) for path in paths]
        self._ends = torch.tensor(list(accumulate(len(part) for part in self._parts)))
        self.shape = (int(self._ends[-1]), *self._parts[0].shape[1:])
        self.dtype = self._parts[0].dtype
        self.num_bytes = sum(part.numel() * part.element_size() for part in self._parts)

    def whole(self) -> Tensor:
        """Return all rows as one plain tensor, a copy."""
        return torch.cat(self._parts)

    def to_memory(self) -> None:
        """Read all files now, into one plain tensor: the fastest to index."""
        self._parts = [self.whole()]
        # take() then needs no search for the part that a row is in.
        self._ends = self._ends[-1:]

    def take(self, rows: Tensor) -> Tensor:
        """Return rows [N] int64 as [N, …], a copy. Raises IndexError for a row beyond the table."""
        if len(self._parts) == 1:
            # index_select itself refuses rows beyond the table.
            return self._parts[0].index_select(0, rows)

        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.shape[0]:
            raise IndexError(f"rows {int(rows.min())} … {int(rows.max())} of {self.shape[0]}")

        # File by file, as each is one copy.
        taken = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        part_N = torch.bucketize(rows, self._ends, right=True)
        for number in part_N.unique().tolist():
            here = (part_N == number).nonzero().flatten()
            part = self._parts[number]
            taken[here] = part.index_select(0, rows[here] - (self._ends[number] - len(part)))

        return taken


def row_table(folder: Path, prefix: str) -> RowTable:
    """Return what RowWriters of all ranks have written under the prefix. Raises ValueError."""
    # five digits each; another prefix may go on with a number of its own
    paths = sorted(folder.glob(f"{prefix}_?????_?????.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no {prefix}_*.safetensors; remove it, it is made again")
    return RowTable(paths)


def row_tables(folder: Path, kind: str) -> dict[str, RowTable]:
    """Return name → table, of all prefixes that are `kind` and a name."""
    # without the numbers of rank and file
    prefixes = {path.name.rsplit("_", 2)[0] for path in folder.glob(f"{kind}*.safetensors")}
    return {prefix.removeprefix(kind): row_table(folder, prefix) for prefix in sorted(prefixes)}
