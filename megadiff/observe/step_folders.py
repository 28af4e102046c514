"""Say when a step is kept, find and drop its folder, e.g. `samples/step_000010/`."""

from __future__ import annotations

import shutil
from pathlib import Path


def is_due(every: int, step: int, *, num_steps: int) -> bool:
    """Say whether step is a multiple of `every` (0: never) or the last of the run."""
    return step == num_steps or bool(every and step % every == 0)


def step_name(step: int) -> str:
    """Name a step's folder. Names sort by step below 1,000,000."""
    return f"step_{step:06d}"


def step_folder(parent: Path, step: int) -> Path:
    return parent / step_name(step)


def step_folders(parent: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every step, by rising step; other names are left out."""
    names = [(path.name.removeprefix("step_"), path) for path in parent.glob("step_*/")]
    # As numbers: from step 1,000,000 on names no longer sort by step.
    return sorted((int(number), path) for number, path in names if number.isdecimal())


def drop_steps_after(parent: Path, step: int) -> None:
    """Remove the folders of later steps: a run resumed at `step` writes them again."""
    for later, folder in step_folders(parent):
        if later > step:
            shutil.rmtree(folder)
