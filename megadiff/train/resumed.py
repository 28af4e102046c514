"""Say at a resume which settings differ from those of the checkpoint that it goes on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadiff.checkpoint.run_folders import read_config
from megadiff.config.flat import flat_texts
from megadiff.config.load import save_config, to_dict
from megadiff.config.rewards import NAMED_SECTIONS
from megadiff.config.schema import Config
from megadiff.observe.events import Events

logger = logging.getLogger(__name__)
ABSENT = "none"
# They say where a run is, what is saved and what is looked at, and not what is trained.
# engine.offload=auto is decided anew at every start.
WITHOUT_EFFECT = (
    "run.dir",
    "run.name",
    "checkpoint.",
    "observe.",
    "track",
    "sample_every",
    "engine.offload",
    "rollout.registry",
    "rollout.stage_config",
    "sync.folder",
)
# With others the rewards before and after are no longer of one kind.
GRAVE = ("reward.", "algorithm.", "rollout.")
# Of rollout, how samples are computed and not which.
MACHINERY = (
    "rollout.batch_size",
    "rollout.compile",
    "rollout.tp",
    "rollout.sleep",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.heartbeat_s",
    "rollout.max_restarts",
    "rollout.mode",
    "rollout.num_replicas",
    "rollout.min_replicas",
)


def tell_begin(config: Config, resumed_from: Path | None, *, step: int, events: Events) -> None:
    """Write the event of a start; of a resume also which settings are others than before."""
    if not step:
        events.write("run_started", step=step)
        return
    text = other_settings(config, resumed_from, step=step) if resumed_from else ""
    events.write("run_resumed", step=step, text=text)


def record_config(config: Config, folder: Path, *, step: int) -> None:
    """Write config.yaml into the run's folder, unless this start has no step left to train."""
    path = folder / "config.yaml"
    # Its settings have then made nothing of what is in the folder.
    if step < config.train.num_steps or not path.exists():
        save_config(config, path)


def other_settings(config: Config, checkpoint: Path, *, step: int) -> str:
    """Log which settings differ from the checkpoint's, and return them as a text; "" for none.

    It warns where rewards, algorithm or sampling are others.
    """
    try:
        before = read_config(checkpoint)
    except ValueError as error:
        # A converted checkpoint, or one from elsewhere, may have none.
        logger.info("settings are not compared with those of the checkpoint: %s", error)
        return ""

    changes = changed_settings(before, to_dict(config))
    if not changes:
        return ""
    text = ", ".join(f"{key} {old} → {new}" for key, (old, new) in changes.items())
    is_grave = any(key.startswith(GRAVE) and key not in MACHINERY for key in changes)
    level = logging.WARNING if is_grave else logging.INFO
    logger.log(level, "resumed at step %d with other settings: %s", step, text)

    return f"with other settings: {text}"


def changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return dotted key → its value before and after, for the keys that matter to training.

    A key that only one version of megadiff has is left out, a reward or judge that was added or
    removed is not.
    """
    old = dict(flat_texts(before))
    new = dict(flat_texts(after))
    changes = {}

    for key in dict.fromkeys([*new, *old]):
        is_named = key.startswith(tuple(f"{section}." for section in NAMED_SECTIONS))
        is_comparable = is_named or (key in old and key in new)
        if key.startswith(WITHOUT_EFFECT) or not is_comparable or old.get(key) == new.get(key):
            continue
        changes[key] = (old.get(key, ABSENT), new.get(key, ABSENT))

    return changes
