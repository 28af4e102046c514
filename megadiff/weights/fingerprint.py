"""A 64-bit fingerprint of a tensor's bits, computed where the tensor lives and equal on CPU and GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}  # hashed at once: what a CPU caches; 4 × 128 MiB on a GPU
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
    words = [_as_words(tensor.detach().contiguous()).reshape(-1) for tensor in tensors.values()]
    device = words[0].device
    totals = torch.zeros(len(words), dtype=torch.int64, device=device)
    for parts in _packed([len(word) for word in words], CHUNK_ELEMENTS[device.type]):
        owners, begins, ends = (
            torch.tensor(column).to(device, non_blocking=True) for column in zip(*parts, strict=True)
        )
        chunk = torch.cat([words[owner][begin:end].to(torch.int64) for owner, begin, end in parts])
        totals.index_add_(0, owners, _part_sums(chunk, begins, ends))
    return {
        name: f"{(total + _salt(tensor)) % (1 << 64):016x}"
        for (name, tensor), total in zip(tensors.items(), totals.tolist(), strict=True)
    }


def _packed(lengths: Sequence[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Parts (place, begin, end) that cover all tensors, in lists of at most `size` elements: small tensors are hashed
    together, as on a GPU each operation costs the same for few elements and for many."""
    parts: list[tuple[int, int, int]] = []
    room = size
    for place, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + room)
            parts.append((place, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield parts
                parts, room = [], size
    if parts:
        yield parts


def _part_sums(chunk: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """[parts] int64: sums of the hashes of consecutive parts of chunk, which is overwritten. begins, ends: where each
    part lies in its own tensor. The sum of a part is a difference of running sums, which wrap as the sum itself does."""
    lengths = ends - begins
    last = lengths.cumsum(0)
    position = torch.arange(1, len(chunk) + 1, device=chunk.device)
    if len(lengths) == 1:
        position += begins
    else:
        position += (begins - last + lengths).repeat_interleave(lengths, output_size=len(chunk))
    word = chunk.mul_(_MIX).add_(position.mul_(_MULTIPLIER))
    word ^= word >> 29
    word.mul_(_MULTIPLIER)
    if len(lengths) == 1:
        return word.sum(0, keepdim=True)
    return word.cumsum(0)[last - 1].diff(prepend=last.new_zeros(1))


def _salt(tensor: Tensor) -> int:
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return int.from_bytes(header, "little") % ((1 << 61) - 1)


def _as_words(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers of its element size."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(words[tensor.element_size()]) if tensor.dtype != torch.bool else tensor.to(torch.uint8)
