"""Seals: a digest of JSON text that stands in the text itself, so that any flipped bit in it shows.

Headers of shard files and progress.json carry one. It is taken over all bytes, with zeros in its
own place.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SEAL_KEY = "megadiff_seal"
UNSEALED = "0" * 32  # as wide as any seal, so that sealing moves no byte
# Within a JSON string the quotes would be escaped, so that only the key itself matches.
_SEAL = re.compile(rb'"' + SEAL_KEY.encode() + rb'": ?"([0-9a-f]{32})"')


def digest(data: bytes) -> str:
    """Return 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sealed(text: bytes) -> bytes:
    """Fill in the seal of a text that has UNSEALED, or an old seal, under the key."""
    begin, end = _place(text)
    assert begin < end, "the text has no place for one seal"
    text = text[:begin] + UNSEALED.encode() + text[end:]
    return text[:begin] + digest(text).encode() + text[end:]


def check_seal(text: bytes, path: Path, *, what: str) -> None:
    """Raise ValueError, naming the file and `what` of it, when the text is not what was sealed."""
    begin, end = _place(text)
    expected = text[begin:end].decode()
    actual = digest(text[:begin] + UNSEALED.encode() + text[end:])
    if begin == end or actual != expected:
        raise ValueError(
            f"{path} is corrupt: {what} has the digest {actual}, {expected or 'none'} was written "
            "with it; use the checkpoint before, or a copy of this one"
        )


def _place(text: bytes) -> tuple[int, int]:
    """Return where the seal's digits begin and end; an empty range for a text without one seal."""
    matches = list(_SEAL.finditer(text))
    return matches[0].span(1) if len(matches) == 1 else (0, 0)
