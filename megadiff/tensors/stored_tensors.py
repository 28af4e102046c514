"""Tensors on disk: known by their files' headers, and read whole when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megadiff.parallel.plan import LORA_A, LORA_B
from megadiff.tensors.shards import ShardFolder
from megadiff.tensors.tensor_file import TensorFile, TensorMeta

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUM_NAMED = 8  # problems that one message lists


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor on disk. path: the file or folder that messages name.

    read: returns the whole tensor, which must not be written to; raises ValueError for damage.
    """

    meta: TensorMeta
    path: Path
    read: Callable[[], Tensor]


StoredTensors = dict[str, StoredTensor]


def from_file(file: TensorFile, key: str) -> StoredTensor:
    return StoredTensor(meta=file.tensors[key], path=file.path, read=partial(file.tensor, key))


def from_checkpoint(shards: ShardFolder) -> StoredTensors:
    """Return all tensors of a checkpoint. Reading one checks the fingerprints of its pieces."""
    return {
        name: StoredTensor(
            meta=shards.meta(name), path=shards.folder, read=partial(shards.tensor, name)
        )
        for name in shards.shapes
    }


def cast(stored: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    # The file's header is written from it, before anything is read.
    meta = TensorMeta(dtype=dtype, shape=stored.meta.shape)
    return replace(stored, meta=meta, read=lambda: stored.read().to(dtype))


def prefixed(prefix: str, tensors: StoredTensors) -> StoredTensors:
    return {f"{prefix}{name}": stored for name, stored in tensors.items()}


def total_bytes(tensors: StoredTensors) -> int:
    return sum(stored.meta.num_bytes for stored in tensors.values())


def merged(base: StoredTensors, lora: StoredTensors, *, scale: float) -> StoredTensors:
    """Return the tensors that a LoRA changes: W + scale · B A, in float32.

    lora: `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank].
    """
    changed = {}
    for name in lora:
        module, _, suffix = name.rpartition(f".{LORA_A}")
        if not module or suffix:
            continue  # B comes with its A
        weight = f"{module}.weight"
        a = lora[name]
        b = lora[f"{module}.{LORA_B}"]
        changed[weight] = _with_lora(base[weight], a, b, scale=scale)
    return changed


def _with_lora(
    weight: StoredTensor, a: StoredTensor, b: StoredTensor, *, scale: float
) -> StoredTensor:
    def read() -> Tensor:
        # In float32, so that the sum is rounded once, when it is cast.
        # The copy is changed in place, as large weights take much memory.
        total = weight.read().to(torch.float32, copy=True)
        return total.addmm_(b.read().float(), a.read().float(), alpha=scale)

    meta = TensorMeta(dtype=torch.float32, shape=weight.meta.shape)
    return StoredTensor(meta=meta, path=weight.path, read=read)


def listed(problems: Sequence[str]) -> str:
    """Join the first problems, and count the others."""
    more = f" and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
    return "; ".join(problems[:NUM_NAMED]) + more
