"""Define what a tracker of a run may receive."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from megadiff.observe.samples import SavedSample


class Tracker:
    """Receive what a run records; a tracker overrides what it has a use for."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step's metrics, which may hold NaN and infinity."""

    def pictures(self, name: str, step: int, samples: Sequence[SavedSample]) -> None:
        """Take samples whose files are in the run's folder. name: samples or evaluation."""

    def page(self, path: Path) -> None:
        """Take the report page of a run that has ended."""

    def close(self) -> None:
        """Write what is left. Nothing is received afterwards."""


def reward_table(samples: Sequence[SavedSample]) -> tuple[list[str], list[list[float | None]]]:
    """Return columns and a row a sample: its total, where any sample has one, and each reward."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    has_total = any(sample.reward is not None for sample in samples)
    rows = []
    for sample in samples:
        total = [sample.reward] if has_total else []
        rows.append([*total, *(sample.rewards.get(name) for name in columns)])
    return (["reward", *columns] if has_total else columns), rows


def import_for(tracker: str, module: str) -> ModuleType:
    """Import what a tracker needs. Raises ValueError, with the extra to install, without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(not_installed(tracker)) from error


def not_installed(tracker: str) -> str:
    """Return what to tell a user whose config names a tracker that cannot be imported."""
    return (
        f"track has {tracker}, which is not installed; pip install 'megadiff[{tracker}]' or "
        f"take {tracker} out of track"
    )
