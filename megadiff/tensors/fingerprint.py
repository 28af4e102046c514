"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives, equal on CPU and GPU.

Two steps, both in exact integer arithmetic:
1. The bytes, as rows of ROW_BYTES, are multiplied with a fixed int8 matrix. Machines do that at the
   speed of their memory, and it leaves 1/64 of the data.
2. Those sums are hashed with their row's index in the tensor, and added up mod 2^64.
One changed byte changes a row's sums for certain. Any other difference goes unseen by a chance of
about 2^-56. Here is the CPU's way; fingerprint_gpu does the same in one kernel for all tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from megadiff.types import JsonObject

ROW_BYTES = 2048
NUM_SUMS = 8  # of a row, int32
MAX_FACTOR = 63  # so that two products with a byte fit in 16 bits, in which older CPUs add them
ROWS_AT_ONCE = 1 << 11  # 4 MiB, which a CPU caches
IN_PLACE_BYTES = 1 << 16  # smaller tensors are copied into common rows: fewer calls
# Both multipliers are SplitMix64's, as int64: torch multiplies those, mod 2^64.
# 0x9E3779B97F4A7C15 is odd, so that multiplication by it is a bijection mod 2^64.
_MULTIPLIER = -7046029254386353131
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9


def fingerprint(tensor: Tensor) -> str:
    """Return 16 hex digits.

    A flipped bit, a swapped pair of elements, another dtype or another shape gives another value.
    """
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name → fingerprint of tensors on one device, which is waited for once."""
    if not tensors:
        return {}
    totals = _totals([tensor.detach().contiguous() for tensor in tensors.values()]).tolist()
    return {
        name: _digits(total, tensor.dtype, tensor.shape)
        for (name, tensor), total in zip(tensors.items(), totals, strict=True)
    }


def commit_digest(worker: JsonObject) -> str:
    """Return a SHA-256 over a worker's fingerprints and bound_modules, whatever their order."""
    text = json.dumps(
        # sorted, as JSON keeps the order of both
        [worker["fingerprints"], sorted(set(worker["bound_modules"]))],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def commit_answer(workers: Sequence[JsonObject], digests: Sequence[str]) -> list[JsonObject]:
    """Shorten each worker's answer to its digest, where that is the one the trainer expects.

    digests: of the workers in order; a worker without one answers with all names.
    """
    answer = []
    for index, worker in enumerate(workers):
        digest = commit_digest(worker)
        answer.append({"digest": digest} if digest in digests[index : index + 1] else worker)
    return answer


def _totals(tensors: Sequence[Tensor]) -> Tensor:
    """Return [len(tensors)] int64, the sum of each tensor's hashed rows. tensors: contiguous."""
    device = tensors[0].device
    if device.type == "cuda":
        # It needs Triton, which a CPU host does without.
        from megadiff.tensors import fingerprint_gpu

        return fingerprint_gpu.totals(tensors, _factors(device), multiplier=_MULTIPLIER, mix=_MIX)

    # Runs of rows that are summed at once: (index of the tensor, first row, number of rows).
    large: list[tuple[int, int, int]] = []
    packed: list[tuple[int, int, int]] = []
    sums: list[Tensor] = []
    rests: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        flat = tensor.view(-1).view(torch.uint8)
        size = flat.numel()  # far cheaper than len()
        num_rows = size // ROW_BYTES if size >= IN_PLACE_BYTES else 0
        if num_rows:
            large.append((index, 0, num_rows))
            sums.append(_row_sums(flat[: num_rows * ROW_BYTES].view(num_rows, ROW_BYTES)))
        rest = size - num_rows * ROW_BYTES
        if rest:
            packed.append((index, num_rows, -(-rest // ROW_BYTES)))
            rests.append(flat[num_rows * ROW_BYTES :] if num_rows else flat)

    if rests:
        sums.append(_row_sums(_packed(rests)))
    totals = torch.zeros(len(tensors), dtype=torch.int64)
    if not sums:
        return totals

    indices, firsts, lengths = (
        torch.tensor(column) for column in zip(*large, *packed, strict=True)
    )
    ends = lengths.cumsum(0)
    # a run's rows count on from its first row in the tensor
    row_R = torch.arange(int(ends[-1])) + (firsts - ends + lengths).repeat_interleave(lengths)
    # sums wrap mod 2^64, and so do their differences
    running = _hashed(torch.cat(sums), row_R).cumsum(0)
    totals_of_runs = running[ends - 1].diff(prepend=ends.new_zeros(1))
    return totals.index_add_(0, indices, totals_of_runs)


def _row_sums(rows_RB: Tensor) -> Tensor:
    """Multiply rows, [R, ROW_BYTES] uint8 → [R, NUM_SUMS] int32."""
    factors_BS = _factors(rows_RB.device)
    chunks = rows_RB.view(torch.int8).split(ROWS_AT_ONCE)
    return torch.cat([torch._int_mm(chunk, factors_BS) for chunk in chunks])


def _packed(flats: Sequence[Tensor]) -> Tensor:
    """Lay tensors one after another, [rows, ROW_BYTES]. Each begins a row, filled up with zeros."""
    zeros = flats[0].new_zeros(ROW_BYTES)
    filled = []
    for flat in flats:
        filled += [flat, zeros[: -flat.numel() % ROW_BYTES]]
    return torch.cat(filled).view(-1, ROW_BYTES)


def _hashed(sums_RS: Tensor, row_R: Tensor) -> Tensor:
    """Return [R] int64, a hash of each row's sums and its index in the tensor."""
    words_RW = sums_RS.contiguous().view(torch.int64)
    column_W = torch.arange(1, words_RW.shape[1] + 1, device=words_RW.device)
    word = words_RW * _MIX + (row_R[:, None] * words_RW.shape[1] + column_W) * _MULTIPLIER
    # a product's upper bits depend on all lower ones: the shift brings them down
    word ^= word >> 29
    return word.mul_(_MULTIPLIER).sum(1)


@cache
def _factors(device: torch.device) -> Tensor:
    """Return the matrix, [ROW_BYTES, NUM_SUMS] int8 in ±[1, MAX_FACTOR], fixed for all time."""
    digest = hashlib.shake_128(b"megadiff").digest(ROW_BYTES * NUM_SUMS)
    stream = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    factors = stream.to(torch.int16) % (2 * MAX_FACTOR) - MAX_FACTOR
    # 0 is left out: a byte times 0 would go unseen
    factors += factors >= 0
    return factors.to(torch.int8).view(ROW_BYTES, NUM_SUMS).to(device)


def _digits(total: int, dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{(total + _header(dtype, tuple(shape))) % (1 << 64):016x}"


@cache
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int.from_bytes(f"{dtype}{shape}".encode(), "little") % ((1 << 61) - 1)
