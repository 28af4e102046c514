"""Fingerprint a model folder's trained components, by which checkpoints know their base.

It covers names, dtypes, shapes and every byte of the tensors, and not how they are spread over
files. Headers, sizes and times of files would cost nothing, and take weights of the same shapes for
each other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from megadiff.algorithms import REFERENCE, build_algorithm
from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import agreed, gather_json
from megadiff.parallel.mesh import Mesh
from megadiff.parallel.plan import ParallelPlan
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.model_files import ROOT_FILE, transformer_keys, weight_files
from megadiff.tensors.seals import digest
from megadiff.tensors.tensor_file import TensorFile

# Keys of Progress.base, beside `path`.
ALL = "fingerprint"
NOT_STORED = "not_stored"


def base_weights(config: Config, adapter: ModelAdapter, mesh: Mesh) -> dict[str, str]:
    """Return path and fingerprints of the weights that the run takes from model.path. Collective.

    ALL is of the base under a LoRA, or of the reference policy. NOT_STORED is of what the plan
    never trains, so that no checkpoint holds it. Where a run has no use for one, its key is absent;
    the result is empty without either.
    Each rank hashes its part of the files on its own device. On a GPU that is a copy from the host:
    16 of its cores took a minute and more, while replicas that start beside it need them.
    """
    plan = adapter.plan
    needs_all = config.lora.rank or REFERENCE in build_algorithm(config.algorithm).needs
    if not needs_all and not plan.frozen and not plan.constants:
        return {}

    files = {name: weight_files(adapter.model_folder / name) for name in adapter.components}
    not_stored = agreed(lambda: names_not_stored(files, plan), mesh.cpu_group)
    digits = agreed(
        lambda: tensor_fingerprints(
            files,
            rank=mesh.rank,
            world_size=mesh.world_size,
            device=mesh.device,
            names=None if needs_all else not_stored,
        ),
        mesh.cpu_group,
    )
    of_ranks = gather_json(digits, mesh.cpu_group)

    base = {"path": str(adapter.model_folder.resolve())}
    if needs_all:
        base[ALL] = base_fingerprint(of_ranks)
    if not_stored:
        base[NOT_STORED] = base_fingerprint(of_ranks, names=not_stored)
    return base


def base_difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Say in what our base is not that of a checkpoint; '' where they agree, or cannot be compared.

    Both are as base_weights() returns them.
    """
    for key in (ALL, NOT_STORED):
        if key in theirs and key in ours and theirs[key] != ours[key]:
            return (
                f"was trained over the weights of {theirs['path']} (fingerprint {theirs[key]}), "
                f"but {ours['path']} holds others (fingerprint {ours[key]})"
            )
    return ""


def names_not_stored(files: Mapping[str, Sequence[Path]], plan: ParallelPlan) -> set[str]:
    """Return `component.tensor` of what the plan never trains, so that no checkpoint holds it.

    files: of each component. Names are those in the files.
    """
    names: set[str] = set()
    for component, paths in files.items():
        for path in paths:
            keys = {name: name for name in TensorFile(path).tensors}
            if path.name == ROOT_FILE:  # in which the model's names have a prefix
                keys = transformer_keys(keys)
            never_trained = plan.frozen_names(keys) | (keys.keys() & set(plan.constants))
            names |= {f"{component}.{keys[name]}" for name in never_trained}
    return names


def tensor_fingerprints(
    files: Mapping[str, Sequence[Path]],
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    names: Collection[str] | None = None,
) -> dict[str, str]:
    """Return `component.tensor` → fingerprint of the rank's tensors: each rank has as many bytes.

    files: of each component. device: where they are hashed, a tensor at a time. names: of those
    that are wanted, all for None. Raises ValueError, naming the file, for one that is not whole.
    """
    wanted: dict[str, tuple[TensorFile, str]] = {}
    for component, paths in files.items():
        for file in map(TensorFile, paths):
            for key in file.tensors:
                name = f"{component}.{key}"
                if names is None or name in names:
                    wanted[name] = (file, key)
    total = sum(file.tensors[key].num_bytes for file, key in wanted.values())

    fingerprints: dict[str, str] = {}
    before = 0
    for name, (file, key) in wanted.items():
        # Neighbours go to one rank, which so reads one range of the files.
        owner = min(before * world_size // max(total, 1), world_size - 1)
        if owner == rank:
            fingerprints[name] = fingerprint(file.tensor(key).to(device))
        before += file.tensors[key].num_bytes
    return fingerprints


def base_fingerprint(
    of_ranks: Iterable[Mapping[str, str]], *, names: Collection[str] | None = None
) -> str:
    """Return the one fingerprint of what all ranks found, or of these names alone."""
    joined: dict[str, str] = {}
    for fingerprints in of_ranks:
        joined |= fingerprints
    if names is not None:
        joined = {name: value for name, value in joined.items() if name in names}
    # Sorted: another number of ranks gives another order of the names.
    return digest(json.dumps(joined, sort_keys=True).encode())
