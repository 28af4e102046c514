"""Randomness with an identity: a sample gets the same noise on any replica, in any batch.

The key of a stream is (run seed, step, prompt id, sample index, what for). NumPy's Philox generator
is used because its normal variates are the same on every platform and in every version. torch's
depend on the CPU's vector width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megadiff.types import Shape

ROWS_PER_STREAM = 64  # of row_normals: a stream for each row would cost more than its numbers do


def group_key(*, seed: int, step: int, prompt_id: str) -> str:
    """Return the key of a prompt group's randomness."""
    return f"{seed}/{step}/{prompt_id}"


def sample_keys(group: str, sample_indices: Iterable[int]) -> list[str]:
    """Return the keys by which a group's samples draw all their noise."""
    return [f"{group}/{sample_index}" for sample_index in sample_indices]


def initial_keys(keys: list[str], *, same_noise: bool) -> list[str]:
    """Return by which key each of a group's samples draws its initial noise.

    keys: of the whole group. Under same_noise all take the first one's: groups of one prompt in a
    step have other samples, and so still differ.
    """
    return keys[:1] * len(keys) if same_noise else keys


def initial_latents_rows(shape: Shape, keys: Sequence[str]) -> Tensor:
    """Draw the states at sigma 1, [len(keys), *shape] standard normal float32 on CPU."""
    return normal_rows(shape, [f"{key}/initial" for key in keys])


def sde_noise_rows(shape: Shape, keys: Sequence[str], *, step_index: int) -> Tensor:
    """Draw the noise of one stochastic step, [len(keys), *shape] as above."""
    return normal_rows(shape, [f"{key}/sde/{step_index}" for key in keys])


def window_start(group: str, *, window_size: int, window_range: tuple[int, int]) -> int:
    """Draw the first step of a group's stochastic window, uniform on {low … high − window_size}.

    It is equal within a group: a window per sample was seen to collapse training. It never comes
    from a rank, which would train one fixed window for ever.
    """
    # `high` is exclusive, and so is the bound of integers(): hence the + 1.
    low, high = window_range
    generator = _generator(f"{group}/window")
    return low + int(generator.integers(high - window_size - low + 1))


def row_normals(shape: Shape, *, first: int, count: int, key: str) -> Tensor:
    """Draw rows first … first + count − 1 of the endless list that `key` names: [count, *shape].

    Standard normal float32 on CPU. A row is the same whichever rows it is drawn with, so ranks that
    share a batch draw what one process would.
    """
    streams = range(first // ROWS_PER_STREAM, -(-(first + count) // ROWS_PER_STREAM))
    blocks = normal_rows((ROWS_PER_STREAM, *shape), [f"{key}/{stream}" for stream in streams])
    # The first stream begins at a multiple of ROWS_PER_STREAM, at or before `first`.
    skipped = first - streams.start * ROWS_PER_STREAM
    return blocks.flatten(0, 1)[skipped : skipped + count]


def choice(count: int, num_chosen: int, *, key: str) -> Tensor:
    """Choose num_chosen of 0 … count − 1 without replacement, [num_chosen] int64 in any order."""
    return torch.from_numpy(_generator(key).permutation(count)[:num_chosen])


def uniform(shape: Shape, *, key: str) -> Tensor:
    """Draw uniformly on [−1, 1), float32 on CPU, the same wherever `key` is."""
    return torch.from_numpy(_generator(key).random(shape, dtype=np.float32)).mul_(2).sub_(1)


def seed_of(key: str) -> int:
    """Return 63 bits for a generator of torch's own."""
    return int.from_bytes(_digest(key)[:8], "little") >> 1


def _generator(key: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_digest(key), "little")))


def _digest(key: str) -> bytes:
    # Python's own hash() of a string differs between processes. 16 bytes are Philox's key.
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def normal_rows(shape: Shape, keys: Sequence[str]) -> Tensor:
    """Draw row i of [len(keys), *shape] from keys[i], standard normal float32 on CPU.

    It is what _generator(keys[i]) draws first.
    """
    rows = np.empty((len(keys), *shape), dtype=np.float32)
    # one generator is set to the start of each key's stream: to construct one takes as long as to
    # draw the numbers of a small image
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    start = bits.state

    for row, key in zip(rows, keys, strict=True):
        # The same two little-endian words as those of the integer in _generator().
        start["state"]["key"] = np.frombuffer(_digest(key), dtype="<u8")
        bits.state = start
        generator.standard_normal(out=row, dtype=np.float32)
    return torch.from_numpy(rows)
