"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives and equal on CPU and GPU."""

from __future__ import annotations

from collections.abc import Mapping

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
    return fingerprints({"": tensor})[""]


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name → fingerprint, of tensors on one device, which is waited for once and not for each."""
    if not tensors:
        return {}
    totals = torch.stack([_total(tensor) for tensor in tensors.values()]).tolist()
    return {
        name: f"{(total + _salt(tensor)) % (1 << 64):016x}"
        for (name, tensor), total in zip(tensors.items(), totals, strict=True)
    }


def _total(tensor: Tensor) -> Tensor:
    """int64 scalar on the tensor's device."""
    bits = _as_words(tensor.detach().contiguous()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS].to(torch.int64, copy=True)  # changed in place below
        position = torch.arange(start + 1, start + 1 + chunk.numel(), dtype=torch.int64, device=tensor.device)
        word = chunk.mul_(_MIX).add_(position.mul_(_MULTIPLIER))
        word ^= word >> 29
        total += word.mul_(_MULTIPLIER).sum()
    return total


def _salt(tensor: Tensor) -> int:
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return int.from_bytes(header, "little") % ((1 << 61) - 1)


def _as_words(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers of its element size."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(words[tensor.element_size()]) if tensor.dtype != torch.bool else tensor.to(torch.uint8)
