"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives and equal on CPU and GPU.

Two steps, both in exact integer arithmetic. The bytes, as rows of ROW_BYTES, are multiplied with a fixed int8 matrix,
which machines do at the speed of their memory and which leaves 1/64 of the data; those sums are then hashed with their
place in the tensor and added up mod 2^64. One changed byte changes a row's sums for certain; any other difference goes
unseen by a chance of about 2^-56. Here is the CPU's way; fingerprint_gpu does the same in one kernel for all tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

ROW_BYTES = 2048
NUM_SUMS = 8  # of a row, int32
MAX_FACTOR = 63  # so that two products with a byte fit in 16 bits, in which older CPUs add them
ROWS_AT_ONCE = 1 << 11  # 4 MiB, which a CPU caches
IN_PLACE_BYTES = 1 << 16  # smaller tensors are copied into common rows: fewer calls
_MULTIPLIER = (
    -7046029254386353131
)  # 0x9E3779B97F4A7C15, odd: multiplication by it is a bijection mod 2^64
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9


def fingerprint(tensor: Tensor) -> str:
    """16 hex digits. A flipped bit, a swapped pair of elements, another dtype or another shape gives another value."""
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name → fingerprint, of tensors on one device, which is waited for once and not for each."""
    if not tensors:
        return {}
    totals = _totals([tensor.detach().contiguous() for tensor in tensors.values()]).tolist()
    return {
        name: _digits(total, tensor.dtype, tensor.shape)
        for (name, tensor), total in zip(tensors.items(), totals, strict=True)
    }


class StreamingFingerprint:
    """fingerprint() of a tensor whose bytes come in order, in pieces: update() with each, then digits()."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.dtype, self.shape = dtype, tuple(shape)
        self._total, self._num_rows = 0, 0
        self._rest = torch.empty(0, dtype=torch.uint8)  # less than a row

    def update(self, data: Tensor) -> None:
        """data: the next bytes, uint8 [n] on the CPU. Pieces that are multiples of ROW_BYTES long are not copied."""
        if len(self._rest):
            missing = ROW_BYTES - len(self._rest)
            self._rest, data = torch.cat([self._rest, data[:missing]]), data[missing:]
            if len(self._rest) < ROW_BYTES:
                return
            self._add(self._rest)
        whole = len(data) - len(data) % ROW_BYTES
        self._add(data[:whole])
        self._rest = data[whole:].clone()

    def digits(self) -> str:
        """16 hex digits, of the bytes so far."""
        (rest,) = _totals([self._rest], first_row=self._num_rows).tolist()
        return _digits(self._total + rest, self.dtype, self.shape)

    def _add(self, rows: Tensor) -> None:
        (total,) = _totals([rows], first_row=self._num_rows).tolist()
        self._total += total
        self._num_rows += len(rows) // ROW_BYTES


def _totals(tensors: Sequence[Tensor], *, first_row: int = 0) -> Tensor:
    """[len(tensors)] int64, the sum of each one's hashed rows. tensors: contiguous. first_row: the place of each one's first
    row, on the CPU."""
    device = tensors[0].device
    if device.type == "cuda":
        # It needs Triton, which a CPU host does without.
        from megadiff.tensors import fingerprint_gpu

        return fingerprint_gpu.totals(tensors, _factors(device), multiplier=_MULTIPLIER, mix=_MIX)
    pieces: list[tuple[int, int, int]] = []  # owner, place of the first row, number of rows
    rests: list[tuple[int, int, int]] = []
    sums: list[Tensor] = []
    packed: list[Tensor] = []
    for owner, tensor in enumerate(tensors):
        flat = tensor.view(-1).view(torch.uint8)
        size = flat.numel()  # far cheaper than len()
        whole = size // ROW_BYTES if size >= IN_PLACE_BYTES else 0
        if whole:
            pieces.append((owner, first_row, whole))
            sums.append(_row_sums(flat[: whole * ROW_BYTES].view(whole, ROW_BYTES)))
        rest = size - whole * ROW_BYTES
        if rest:
            rests.append((owner, first_row + whole, -(-rest // ROW_BYTES)))
            packed.append(flat[whole * ROW_BYTES :] if whole else flat)
    if packed:
        sums.append(_row_sums(_packed(packed)))
    totals = torch.zeros(len(tensors), dtype=torch.int64)
    if not sums:
        return totals
    owners, firsts, lengths = (torch.tensor(column) for column in zip(*pieces, *rests, strict=True))
    ends = lengths.cumsum(0)
    place_R = torch.arange(ends[-1]) + (firsts - ends + lengths).repeat_interleave(lengths)
    totals_of_parts = (
        _hashed(torch.cat(sums), place_R).cumsum(0)[ends - 1].diff(prepend=ends.new_zeros(1))
    )
    return totals.index_add_(0, owners, totals_of_parts)


def _row_sums(rows_RB: Tensor) -> Tensor:
    """[R, ROW_BYTES] uint8 → [R, NUM_SUMS] int32."""
    factors_BS = _factors(rows_RB.device)
    return torch.cat(
        [torch._int_mm(chunk, factors_BS) for chunk in rows_RB.view(torch.int8).split(ROWS_AT_ONCE)]
    )


def _packed(flats: Sequence[Tensor]) -> Tensor:
    """[rows, ROW_BYTES]: the tensors one after another, each from the start of a row, filled up with zeros."""
    zeros = flats[0].new_zeros(ROW_BYTES)
    filled = [part for flat in flats for part in (flat, zeros[: -flat.numel() % ROW_BYTES])]
    return torch.cat(filled).view(-1, ROW_BYTES)


def _hashed(sums_RS: Tensor, place_R: Tensor) -> Tensor:
    """[R] int64: a hash of each row's sums and its place."""
    words_RW = sums_RS.contiguous().view(torch.int64)
    column_W = torch.arange(1, words_RW.shape[1] + 1, device=words_RW.device)
    word = words_RW * _MIX + (place_R[:, None] * words_RW.shape[1] + column_W) * _MULTIPLIER
    word ^= word >> 29
    return word.mul_(_MULTIPLIER).sum(1)


@cache
def _factors(device: torch.device) -> Tensor:
    """[ROW_BYTES, NUM_SUMS] int8, fixed for all time: in ±[1, MAX_FACTOR], from a stream of SHAKE-128."""
    stream = torch.frombuffer(
        bytearray(hashlib.shake_128(b"megadiff").digest(ROW_BYTES * NUM_SUMS)), dtype=torch.uint8
    )
    factors = stream.to(torch.int16) % (2 * MAX_FACTOR) - MAX_FACTOR
    factors += factors >= 0
    return factors.to(torch.int8).view(ROW_BYTES, NUM_SUMS).to(device)


def _digits(total: int, dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{(total + _header(dtype, tuple(shape))) % (1 << 64):016x}"


@cache
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int.from_bytes(f"{dtype}{shape}".encode(), "little") % ((1 << 61) - 1)
