"""Say before anything starts that a run has no step left to train, or cannot go on as it is."""

from __future__ import annotations

import logging
from pathlib import Path

from megadiff.checkpoint.run_folders import read_config, read_progress, resume_candidates
from megadiff.config.schema import Config
from megadiff.observe.events import read_events
from megadiff.parallel.collectives import read_once
from megadiff.parallel.mesh import Mesh
from megadiff.train.run import run_folder

logger = logging.getLogger(__name__)


def check_resume_point(config: Config) -> None:
    """Raise ValueError where the checkpoint to resume from does not go with the config.

    It leaves nothing to train, or was trained with another LoRA. Call it on rank 0 alone: it reads
    a header of each rank's file.
    """
    folder, step = _resume_point(config)
    if folder is None:
        return
    _check_num_steps(config, folder, step)
    _check_saved_lora(config, folder)


def _check_num_steps(config: Config, folder: Path, step: int) -> None:
    num_steps = config.train.num_steps
    if step < num_steps or not step:
        return
    # The run's own checkpoint of exactly its last step is no error: that run is finished.
    if step == num_steps and _is_own(folder, config):
        return
    merged = " --to merged" if config.lora.rank else ""
    raise ValueError(
        f"train.num_steps={num_steps}, but {folder} is at step {step}, and num_steps counts from "
        f"the first step of all: nothing is left to train. For more set e.g. train.num_steps="
        f"{2 * step}. To begin at step 0 from these weights: `megadiff convert {folder} "
        f"out{merged}`, then model.path=out checkpoint.resume=auto and another run.name"
    )


def _check_saved_lora(config: Config, folder: Path) -> None:
    """Refuse another LoRA now: each older checkpoint would be tried in vain otherwise."""
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
    anew = "another run.name"
    if config.checkpoint.resume != "auto":
        anew = "checkpoint.resume=auto and another run.name"
    raise ValueError(
        f"lora.{key}={value:g}, but {folder} was trained with lora.{key}={saved_value:g}: set "
        f"lora.rank={rank} lora.alpha={alpha:g} to go on with it, or {anew} to begin anew"
    )


def _scaled(rank: int, alpha: float) -> tuple[int, float]:
    """Return rank and alpha as they act: 0 takes the rank."""
    return rank, alpha or float(rank)


def is_finished(config: Config, mesh: Mesh) -> bool:
    """Return whether the run has ended with its last step, and say so. Collective.

    A run that was stopped or killed between its last checkpoint and its end is not: it is built,
    so its checkpoint is verified as it loads.
    """

    def finished() -> bool:
        run = run_folder(config)
        num_steps = config.train.num_steps
        # First what costs little: the checkpoint is asked for a header of each rank's file.
        ends = [event for event in read_events(run) if event.kind.startswith("run_")]
        if not ends or (ends[-1].kind, ends[-1].step) != ("run_finished", num_steps):
            return False
        folder, step = _resume_point(config)
        if folder is None or step != num_steps or not _is_own(folder, config):
            return False
        text = "%s is finished: %d of train.num_steps=%d; for more set train.num_steps=%d"
        logger.info(text, run, step, num_steps, 2 * step)
        return True

    # Rank 0 decides: on a shared filesystem the others may see older folders.
    return bool(read_once(finished, source=0, group=mesh.cpu_group, world=mesh.cpu_group))


def _resume_point(config: Config) -> tuple[Path | None, int]:
    """Return the checkpoint that a start would go on from, and its step; None and 0 for none.

    Its weights are not read: one of theirs may still turn out to be torn.
    """
    own_checkpoints = run_folder(config) / "checkpoints"
    for folder in resume_candidates(own_checkpoints, config.checkpoint.resume):
        try:
            return folder, read_progress(folder).step
        except (ValueError, OSError):
            # load() says what is wrong with it.
            continue
    return None, 0


def _is_own(checkpoint: Path, config: Config) -> bool:
    return checkpoint.resolve().parent == (run_folder(config) / "checkpoints").resolve()
