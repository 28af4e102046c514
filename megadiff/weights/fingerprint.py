"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives and equal on CPU and GPU."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # bounds the int64 temporaries to 3 × 128 MiB
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15, odd: multiplication by it is a bijection mod 2^64
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9


def fingerprint(tensor: Tensor) -> str:
    """16 hex digits: the sum over elements of hash(bits, position), mod 2^64, mixed with dtype and shape.

    A flipped bit, a swapped pair of elements, another dtype or another shape gives another value. Integer arithmetic
    only, so that the order of the sum does not matter and every device gives the same digits.
    """
    bits = _as_words(tensor.detach().contiguous()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS].to(torch.int64)
        position = torch.arange(start + 1, start + 1 + chunk.numel(), dtype=torch.int64, device=tensor.device)
        word = chunk * _MIX + position * _MULTIPLIER
        word ^= word >> 29
        total += (word * _MULTIPLIER).sum()
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    salt = int.from_bytes(header, "little") % ((1 << 61) - 1)
    return f"{(int(total.item()) + salt) % (1 << 64):016x}"


def _as_words(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers of its element size."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(words[tensor.element_size()]) if tensor.dtype != torch.bool else tensor.to(torch.uint8)
