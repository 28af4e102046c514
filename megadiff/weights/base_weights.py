"""A fingerprint of a model folder's trained components, by which LoRA checkpoints know the base that they belong to.

It covers names, dtypes, shapes and every byte of the tensors, and not how they are spread over files. Headers, sizes or
times of files would be free, and would pass weights of the same shape for each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megadiff.weights.row_sources import FileRows
from megadiff.weights.seals import digest
from megadiff.weights.streaming import fingerprints_of
from megadiff.weights.tensor_file import TensorFile


def tensor_fingerprints(
    files: Mapping[str, Sequence[Path]], *, rank: int = 0, world_size: int = 1
) -> dict[str, str]:
    """Return `component.tensor` → fingerprint of those tensors that fall to the rank: about equally many bytes for each.

    files: of each component. Raises ValueError, naming the file, for one that is not whole.
    """
    opened = {path: TensorFile(path) for paths in files.values() for path in paths}
    total = sum(meta.num_bytes for file in opened.values() for meta in file.tensors.values())
    mine: dict[str, tuple[TensorFile, str]] = {}
    before = 0
    for component, paths in files.items():
        for path in paths:
            for name, meta in opened[path].tensors.items():
                # Neighbours go to one rank, which so reads a range of the files from its beginning to its end.
                owner = min(before * world_size // max(total, 1), world_size - 1)
                if owner == rank:
                    mine[f"{component}.{name}"] = (opened[path], name)
                before += meta.num_bytes
    return fingerprints_of(FileRows(mine), advance=lambda _: None)


def base_fingerprint(of_ranks: Iterable[Mapping[str, str]]) -> str:
    """Return the one fingerprint of what all ranks found."""
    joined = {name: digits for found in of_ranks for name, digits in found.items()}
    return digest(json.dumps(joined, sort_keys=True).encode())
