"""Say before anything starts that a run has no step left to train, or cannot go on as it is."""

from __future__ import annotations

import logging
from pathlib import Path

from megadiff.checkpoint.run_folders import read_config, read_progress, whole_looking
from megadiff.config.schema import Config
from megadiff.observe.events import Events, read_events
from megadiff.parallel.collectives import read_once
from megadiff.parallel.mesh import Mesh
from megadiff.train.run import run_folder

logger = logging.getLogger(__name__)


def check_num_steps(config: Config) -> None:
    """Raise ValueError where the checkpoint to resume from leaves nothing to train.

    The run's own checkpoint of exactly its last step is no error: that run is finished.
    """
    folder, step = _resume_point(config)
    num_steps = config.train.num_steps
    if folder is None or step < num_steps or not step:
        return
    if step == num_steps and _is_own(folder, config):
        return
    raise ValueError(
        f"train.num_steps={num_steps}, but {folder} is at step {step}, and num_steps counts from "
        f"the first step of all: nothing is left to train. For more set e.g. train.num_steps="
        f"{2 * step}. To begin at step 0 from these weights: `megadiff convert {folder} out`, then "
        "model.path=out checkpoint.resume=auto and another run.name"
    )


def check_saved_lora(config: Config) -> None:
    """Raise ValueError where the checkpoint to resume from was trained with another LoRA.

    Each older one would be tried in vain otherwise.
    """
    folder, _ = _resume_point(config)
    if folder is None:
        return
    try:
        saved = read_config(folder)["lora"]
        theirs = (int(saved["rank"]), float(saved["alpha"]))
    except (ValueError, KeyError, TypeError):
        # A checkpoint from elsewhere may say nothing; its tensors are compared when it loads.
        return

    ours = (config.lora.rank, config.lora.alpha)
    if _scaled(*theirs) == _scaled(*ours):
        return
    rank, alpha = theirs
    pairs = zip(("rank", "alpha"), ours, theirs, strict=True)
    key, value, saved_value = next(pair for pair in pairs if pair[1] != pair[2])
    raise ValueError(
        f"lora.{key}={value:g}, but {folder} was trained with lora.{key}={saved_value:g}: set "
        f"lora.rank={rank} lora.alpha={alpha:g} to go on with it, or another run.name to begin anew"
    )


def _scaled(rank: int, alpha: float) -> tuple[int, float]:
    """Return rank and alpha as they act: 0 takes the rank."""
    return rank, alpha or float(rank)


def is_finished(config: Config, mesh: Mesh) -> bool:
    """Return whether the run's own checkpoint is of its last step, and say so. Collective.

    What the run's end must leave behind, its event, is written where it is missing.
    """

    def finished() -> bool:
        folder, step = _resume_point(config)
        is_last = bool(step) and step == config.train.num_steps
        if not is_last or folder is None or not _is_own(folder, config):
            return False
        _complete(config)
        return True

    # Rank 0 decides: on a shared filesystem the others may see older folders.
    return bool(read_once(finished, source=0, group=mesh.cpu_group, world=mesh.cpu_group))


def _complete(config: Config) -> None:
    """Say that the run is finished, in its events too, unless they do."""
    folder = run_folder(config)
    num_steps = config.train.num_steps
    logger.info(
        "%s is finished: %d of train.num_steps=%d; for more set train.num_steps=%d",
        folder,
        num_steps,
        num_steps,
        2 * num_steps,
    )

    # It may have been stopped or killed between its last checkpoint and its end.
    ends = [event.kind for event in read_events(folder) if event.kind.startswith("run_")]
    if ends[-1:] != ["run_finished"]:
        Events(folder).write("run_finished", step=num_steps)


def _resume_point(config: Config) -> tuple[Path | None, int]:
    """Return the checkpoint that a start would go on from, and its step; None and 0 for none.

    Its weights are not read: one of theirs may still turn out to be torn.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None, 0
    folders = [Path(resume)]
    if resume == "auto":
        folders = whole_looking(run_folder(config) / "checkpoints")

    for folder in reversed(folders):
        try:
            return folder, read_progress(folder).step
        except (ValueError, OSError):
            # load() says what is wrong with it.
            continue
    return None, 0


def _is_own(checkpoint: Path, config: Config) -> bool:
    return checkpoint.resolve().parent == (run_folder(config) / "checkpoints").resolve()
