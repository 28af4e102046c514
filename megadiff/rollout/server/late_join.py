"""Bring a replica that comes after the push to the newest version on disk, verified."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica
from megadiff.sync.sync import SentFingerprints
from megadiff.sync.transports.disk import StoredVersion, newest, versions
from megadiff.tensors.boxes import boxes_from_json
from megadiff.tensors.fingerprint import fingerprints

logger = logging.getLogger(__name__)
ATTEMPTS = 3


async def load_newest(replica: Replica, folder: Path) -> None:
    """Bring the replica to the newest whole version in the folder of sync.transport=disk.

    An empty folder leaves it at the model folder's weights.
    Raises ValueError for a version that is torn, of another model, or arrives with other bits.
    """
    for attempt in range(ATTEMPTS):
        if not versions(folder):
            text = "serving the weights of the model folder"
            if attempt:
                text = "the one that was read is gone; nothing is drawn until a push"
            logger.info("%s holds no version: %s", folder, text)
            return

        stored: StoredVersion | None = None
        try:
            stored = newest(folder)
            return await _load(replica, stored)
        except (OSError, ValueError, RuntimeError, SafetensorError, Refused) as error:
            # A version may go while it is read, or be another push's: then the newest is read.
            # RuntimeError: a worker opens the files by itself.
            if attempt == ATTEMPTS - 1 or (stored and _is_there(stored, folder)):
                which = f"version {stored.version}" if stored else "its newest version"
                raise ValueError(f"--weights {folder}, {which}: {error}") from error


def _is_there(stored: StoredVersion, folder: Path) -> bool:
    """Tell whether the folder's newest version is still of the push that was read."""
    try:
        return newest(folder).push == stored.push
    except (OSError, ValueError):
        return False


async def _load(replica: Replica, stored: StoredVersion) -> None:
    boxes = boxes_from_json(replica.workers)
    sent = SentFingerprints({replica.spec.name: boxes}, lora=stored.lora)
    read: dict[str, str] = {}

    await replica.weights_begin(stored.version, stored.manifest, stored.lora, {"name": "disk"})
    for path in stored.files:
        # A later version may have brought some of the file's tensors again.
        tensors = {
            name: tensor for name, tensor in load_file(path).items() if name in stored.manifest
        }
        read |= await asyncio.to_thread(fingerprints, tensors)
        await asyncio.to_thread(sent.add, list(tensors.items()))
        await replica.weights_bucket_at(
            {"transport": "disk", "file": f"{path.parent.name}/{path.name}"}
        )

    torn = sorted(name for name, value in stored.fingerprints.items() if read.get(name) != value)
    if torn:
        raise ValueError(
            f"{len(torn)} tensors are not as they were written: {', '.join(torn[:3])}; "
            "the folder is torn"
        )

    answer = await replica.weights_commit(stored.version)
    sent.check(replica.spec.name, stored.version, answer)
