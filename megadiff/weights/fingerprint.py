"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives and equal on CPU and GPU.

Two steps, both in exact integer arithmetic. The bytes, as rows of ROW_BYTES, are multiplied with a fixed int8 matrix,
which machines do at the speed of their memory and which leaves 1/64 of the data; those sums are then hashed with their
place in the tensor and added up mod 2^64. One changed byte changes a row's sums for certain; any other difference goes
unseen by a chance of about 2^-56.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

ROW_BYTES = 2048
NUM_SUMS = 8  # of a row, int32: the fewest that a GPU's int8 matrix product gives
MAX_FACTOR = 63  # so that two products with a byte fit in 16 bits, in which older CPUs add them
LEAST_ROWS = 32  # a GPU's int8 matrix product wants more than 16
ROWS_AT_ONCE = {"cpu": 1 << 11, "cuda": 1 << 19}  # 4 MiB, which a CPU caches; 1 GiB
IN_PLACE_BYTES = {"cpu": 1 << 16, "cuda": 1 << 20}  # smaller tensors are copied into common rows: fewer kernels
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15, odd: multiplication by it is a bijection mod 2^64
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9


def fingerprint(tensor: Tensor) -> str:
    """16 hex digits. A flipped bit, a swapped pair of elements, another dtype or another shape gives another value."""
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name → fingerprint, of tensors on one device, which is waited for once and not for each."""
    if not tensors:
        return {}
    totals = _totals([_as_bytes(tensor) for tensor in tensors.values()]).tolist()
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


def _totals(flats: Sequence[Tensor], *, first_row: int = 0) -> Tensor:
    """[len(flats)] int64, the sum of each tensor's hashed rows. first_row: the place of each one's first row."""
    device = flats[0].device
    pieces: list[tuple[int, int, int]] = []  # owner, place of the first row, number of rows
    rests: list[tuple[int, int, int]] = []
    sums: list[Tensor] = []
    packed: list[Tensor] = []
    for owner, flat in enumerate(flats):
        size = flat.numel()  # far cheaper than len()
        whole = size // ROW_BYTES
        if whole * ROW_BYTES < IN_PLACE_BYTES[device.type] or not _is_aligned(flat):
            whole = 0
        if whole:
            pieces.append((owner, first_row, whole))
            sums.append(_row_sums(flat[: whole * ROW_BYTES].view(whole, ROW_BYTES)))
        rest = size - whole * ROW_BYTES
        if rest:
            rests.append((owner, first_row + whole, -(-rest // ROW_BYTES)))
            packed.append(flat[whole * ROW_BYTES :] if whole else flat)
    if packed:
        sums.append(_row_sums(_packed(packed)))
    totals = torch.zeros(len(flats), dtype=torch.int64, device=device)
    if not sums:
        return totals
    columns = list(zip(*pieces, *rests, strict=True))
    owners, firsts, lengths = (
        torch.tensor(column, dtype=torch.int64).to(device, non_blocking=True) for column in columns
    )
    ends, num_rows = lengths.cumsum(0), sum(columns[2])
    place_R = torch.arange(num_rows, device=device)
    place_R += (firsts - ends + lengths).repeat_interleave(lengths, output_size=num_rows)
    totals_of_parts = _hashed(torch.cat(sums), place_R).cumsum(0)[ends - 1].diff(prepend=ends.new_zeros(1))
    return totals.index_add_(0, owners, totals_of_parts)


def _is_aligned(flat: Tensor) -> bool:
    """As a GPU's matrix product reads it; a CPU's takes any place, as in a file's pages."""
    return flat.device.type == "cpu" or flat.data_ptr() % 16 == 0


def _row_sums(rows_RB: Tensor) -> Tensor:
    """[R, ROW_BYTES] uint8 → [R, NUM_SUMS] int32."""
    factors_BS, num_rows, at_once = _factors(rows_RB.device), rows_RB.shape[0], ROWS_AT_ONCE[rows_RB.device.type]
    rows_RB = rows_RB.view(torch.int8)
    if num_rows < LEAST_ROWS and rows_RB.device.type != "cpu":
        padding = rows_RB.new_zeros(LEAST_ROWS - num_rows, ROW_BYTES)
        return torch._int_mm(torch.cat([rows_RB, padding]), factors_BS)[:num_rows]
    if num_rows <= at_once:
        return torch._int_mm(rows_RB, factors_BS)
    whole = num_rows - num_rows % at_once
    products = [torch._int_mm(chunk, factors_BS) for chunk in rows_RB[:whole].split(at_once)]
    return torch.cat([*products, *([_row_sums(rows_RB[whole:].view(torch.uint8))] if whole < num_rows else [])])


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
    stream = torch.frombuffer(bytearray(hashlib.shake_128(b"megadiff").digest(ROW_BYTES * NUM_SUMS)), dtype=torch.uint8)
    factors = stream.to(torch.int16) % (2 * MAX_FACTOR) - MAX_FACTOR
    factors += factors >= 0
    factors_BS = factors.to(torch.int8).view(ROW_BYTES, NUM_SUMS).to(device)
    return factors_BS if device.type == "cpu" else factors_BS.t().contiguous().t()  # column by column: 4 times faster


def _digits(total: int, dtype: torch.dtype, shape: Sequence[int]) -> str:
    header = f"{dtype}{tuple(shape)}".encode()
    return f"{(total + int.from_bytes(header, 'little') % ((1 << 61) - 1)) % (1 << 64):016x}"


def _as_bytes(tensor: Tensor) -> Tensor:
    """[n] uint8, the tensor's bytes, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
