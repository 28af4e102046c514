"""Compare the versions that the engines were tested on with the installed ones."""

from __future__ import annotations

import importlib.metadata


def check_version(package: str, *, tested: tuple[str, ...]) -> None:
    """Raises ValueError when another version than the tested ones is installed, or none."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    if version not in tested:
        raise ValueError(
            f"{package} {version} is none of {', '.join(tested)}, on which this engine was tested"
        )
