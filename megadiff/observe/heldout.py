"""Compare a run's first and last evaluation: what training did to prompts that it never saw."""

from __future__ import annotations

import logging
from pathlib import Path

from megadiff.observe.evaluation import Comparison, Evaluation, evaluation_folders, read_evaluation

logger = logging.getLogger(__name__)


def read_evaluations(run_folder: Path) -> list[tuple[Path, Evaluation]]:
    """Return (folder, evaluation) of the first and the last evaluated step: two, one or none.

    A record that cannot be read is skipped with a warning.
    """
    folders = [folder for _, folder in evaluation_folders(run_folder)]
    # One that cannot be read must not hide a run's others.
    first = _first_readable(folders)
    # From the end: the newest that can be read, which may be the first again.
    last = _first_readable(folders[::-1]) if first else None
    if first is None or last is None:
        return []
    return [first] if first[0] == last[0] else [first, last]


def _first_readable(folders: list[Path]) -> tuple[Path, Evaluation] | None:
    for folder in folders:
        try:
            return folder, read_evaluation(folder)
        except ValueError as error:
            logger.warning("skipped: %s", error)
    return None


def compare(evaluations: list[tuple[Path, Evaluation]]) -> Comparison | None:
    """Compare the last with the first; None for fewer than two, or where samples differ."""
    if len(evaluations) < 2:
        return None
    (_, first), (folder, last) = evaluations
    try:
        return Comparison(evaluation=last, baseline=first)
    except ValueError as error:
        logger.warning("%s is not compared with the run's first evaluation: %s", folder, error)
        return None


def compare_ends(run_folder: Path) -> Comparison | None:
    """Compare the evaluations that are in the run's folder now."""
    return compare(read_evaluations(run_folder))
