"""Fingerprint a model folder's trained components, by which LoRA checkpoints know their base.

It covers names, dtypes, shapes and every byte of the tensors, and not how they are spread over
files. Headers, sizes and times of files would cost nothing, and take weights of the same shapes for
each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.seals import digest
from megadiff.tensors.tensor_file import TensorFile


def tensor_fingerprints(
    files: Mapping[str, Sequence[Path]], *, rank: int = 0, world_size: int = 1
) -> dict[str, str]:
    """Return `component.tensor` → fingerprint of the rank's tensors: each rank has as many bytes.

    files: of each component. Raises ValueError, naming the file, for one that is not whole.
    """
    opened = {path: TensorFile(path) for paths in files.values() for path in paths}
    total = sum(meta.num_bytes for file in opened.values() for meta in file.tensors.values())

    fingerprints: dict[str, str] = {}
    before = 0
    for component, paths in files.items():
        for path in paths:
            for name, meta in opened[path].tensors.items():
                # Neighbours go to one rank, which so reads one range of the files.
                owner = min(before * world_size // max(total, 1), world_size - 1)
                if owner == rank:
                    fingerprints[f"{component}.{name}"] = fingerprint(opened[path].tensor(name))
                before += meta.num_bytes
    return fingerprints


def base_fingerprint(of_ranks: Iterable[Mapping[str, str]]) -> str:
    """Return the one fingerprint of what all ranks found."""
    joined: dict[str, str] = {}
    for fingerprints in of_ranks:
        joined |= fingerprints
    # Sorted: another number of ranks gives another order of the names.
    return digest(json.dumps(joined, sort_keys=True).encode())
