"""Write a config as dotted keys and their values, as texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat_texts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key → value as text."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_texts(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()

    return "''" if value == "" else str(value)
