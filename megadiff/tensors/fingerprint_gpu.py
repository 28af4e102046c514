"""Fingerprint many tensors on a GPU at once: the row sums and hashes of tensors/fingerprint.py.

It takes one pass over memory and one launch. A launch for each of a transformer's two thousand
tensors would take longer than reading them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128  # of one tensor, which a program reads
TILE_BYTES = 128  # of each row at a time
COLUMNS = 16  # of the matrix product; a GPU's tiles have no fewer


def totals(tensors: Sequence[Tensor], factors_BS: Tensor, *, multiplier: int, mix: int) -> Tensor:
    """Return [len(tensors)] int64, the sum of each tensor's hashed rows, mod 2^64.

    tensors: contiguous, on one GPU, at any address. factors_BS: [row bytes, sums] int8 there.
    multiplier, mix: of the hash.
    """
    row_bytes, num_sums = factors_BS.shape
    device = factors_BS.device
    columns_BC = torch.zeros(row_bytes, COLUMNS, dtype=torch.int8, device=device)
    columns_BC[:, :num_sums] = factors_BS

    table = torch.tensor(
        [[tensor.data_ptr(), tensor.nbytes] for tensor in tensors], dtype=torch.int64
    )
    tiles = -(-table[:, 1] // (row_bytes * TILE_ROWS))
    # of each tensor: address, bytes, number of its first tile
    table = torch.cat([table, (tiles.cumsum(0) - tiles)[:, None]], 1).to(device)
    owners = torch.arange(len(tensors), dtype=torch.int32).repeat_interleave(tiles).to(device)

    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if len(owners):
        with torch.cuda.device(device):
            _hash_tiles[(len(owners),)](
                table, owners, columns_BC, result, multiplier, mix, row_bytes, num_sums,
                TILE_ROWS, TILE_BYTES, COLUMNS, num_warps=4, num_stages=4,
            )  # fmt: skip
    return result


@triton.jit
def _hash_tiles(
    table, owners, factors, result, multiplier, mix,
    ROW_BYTES: tl.constexpr, NUM_SUMS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a tile's hashes to its tensor's total: rows times factors, hashed with row indices."""
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    data = tl.load(table + owner * 3).to(tl.pointer_type(tl.int8))
    num_bytes = tl.load(table + owner * 3 + 1)
    row = (tile - tl.load(table + owner * 3 + 2)) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, COLUMNS)
    byte = tl.arange(0, TILE_BYTES)
    sums = tl.zeros((TILE_ROWS, COLUMNS), dtype=tl.int32)
    for start in range(0, ROW_BYTES, TILE_BYTES):
        offset = row[:, None] * ROW_BYTES + (start + byte)[None, :]
        values = tl.load(data + offset, mask=offset < num_bytes, other=0)
        rows_of_factors = (start + byte)[:, None] * COLUMNS
        sums += tl.dot(values, tl.load(factors + rows_of_factors + column[None, :]))
    low, high = tl.split(sums.to(tl.int64).reshape(TILE_ROWS, COLUMNS // 2, 2))
    words = (low & 0xFFFFFFFF) | (high << 32)  # as the CPU reads pairs of int32
    word = tl.arange(0, COLUMNS // 2)[None, :]
    hashed = words * mix + (row[:, None] * (NUM_SUMS // 2) + word + 1) * multiplier
    hashed = (hashed ^ (hashed >> 29)) * multiplier
    is_real = (row[:, None] * ROW_BYTES < num_bytes) & (word < NUM_SUMS // 2)
    tl.atomic_add(result + owner, tl.sum(tl.where(is_real, hashed, 0)), sem="relaxed")
