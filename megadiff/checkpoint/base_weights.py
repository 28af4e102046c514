"""Fingerprint a model folder's trained components, by which LoRA checkpoints know their base.

It covers names, dtypes, shapes and every byte of the tensors, and not how they are spread over
files. Headers, sizes and times of files would cost nothing, and take weights of the same shapes for
each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from megadiff.algorithms import REFERENCE, build_algorithm
from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import agreed, gather_json
from megadiff.parallel.mesh import Mesh
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.model_files import weight_files
from megadiff.tensors.seals import digest
from megadiff.tensors.tensor_file import TensorFile


def base_weights(config: Config, adapter: ModelAdapter, mesh: Mesh) -> dict[str, str]:
    """Return path and fingerprint of the weights that the run takes from model.path. Collective.

    Those are the base under a LoRA, or the reference policy; empty where the run has neither.
    Each rank hashes its part of the files on its own device. On a GPU that is a copy from the host:
    16 of its cores took a minute and more, while replicas that start beside it need them.
    """
    if not config.lora.rank and REFERENCE not in build_algorithm(config.algorithm).needs:
        return {}

    files = {name: weight_files(adapter.model_folder / name) for name in adapter.components}
    digits = agreed(
        lambda: tensor_fingerprints(
            files, rank=mesh.rank, world_size=mesh.world_size, device=mesh.device
        ),
        mesh.cpu_group,
    )

    return {
        "path": str(adapter.model_folder.resolve()),
        "fingerprint": base_fingerprint(gather_json(digits, mesh.cpu_group)),
    }


def tensor_fingerprints(
    files: Mapping[str, Sequence[Path]],
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> dict[str, str]:
    """Return `component.tensor` → fingerprint of the rank's tensors: each rank has as many bytes.

    files: of each component. device: where they are hashed, a tensor at a time. Raises ValueError,
    naming the file, for one that is not whole.
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
                    tensor = opened[path].tensor(name).to(device)
                    fingerprints[f"{component}.{name}"] = fingerprint(tensor)
                before += meta.num_bytes
    return fingerprints


def base_fingerprint(of_ranks: Iterable[Mapping[str, str]]) -> str:
    """Return the one fingerprint of what all ranks found."""
    joined: dict[str, str] = {}
    for fingerprints in of_ranks:
        joined |= fingerprints
    # Sorted: another number of ranks gives another order of the names.
    return digest(json.dumps(joined, sort_keys=True).encode())
