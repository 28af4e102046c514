"""Declare a config key: its type, its one default, its bounds and a sentence for the docs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import field
from typing import Any

_SIGNS = {"above": ">", "at_least": "≥", "below": "<", "at_most": "≤"}


def key(
    default: Any,
    text: str,
    *,
    heading: str = "",
    choices: tuple[str, ...] = (),
    **bounds: float,
) -> Any:
    """Declare one key. `default` is MISSING where the user must give a value.

    text: a sentence for the docs. heading: opens a group of keys there.
    choices and bounds (above, at_least, below, at_most) are rules for the value, or for each value
    of a list or mapping.
    """
    metadata = {"text": text, "heading": heading, "choices": choices, "bounds": bounds}
    if isinstance(default, list | dict):
        # A dataclass refuses a mutable default, which all its objects would share.
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def bound_texts(bounds: Mapping[str, float]) -> list[str]:
    """Return a key's bounds as texts: ["> 0", "≤ 10"]."""
    return [f"{_SIGNS[name]} {bound}" for name, bound in bounds.items()]
