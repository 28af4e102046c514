"""A replica that comes after the push takes the newest version from the folder of sync.transport=disk, and verifies it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from megadiff.rollout.server.policy import Refused
from megadiff.rollout.server.replica import Replica
from megadiff.sync.sync import CommitCheck, Ledger
from megadiff.sync.transports.base import SyncError
from megadiff.sync.transports.disk import StoredVersion, newest, versions
from megadiff.tensors.boxes import boxes_from_json
from megadiff.tensors.fingerprint import fingerprints

logger = logging.getLogger(__name__)
ATTEMPTS = 3


async def load_newest(replica: Replica, folder: Path) -> None:
    """Brings the replica to the newest whole version in the folder; an empty one leaves it at the model folder's weights.

    A version that goes while it is read, because newer ones came, is given up for the newest. Raises ValueError for a
    version that is torn, belongs to another model, or arrives with other bits.
    """
    for attempt in range(ATTEMPTS):
        held = versions(folder)
        if not held:
            logger.info("%s holds no version yet; serving the weights of the model folder", folder)
            return
        try:
            return await _load(replica, newest(folder))
        except (OSError, ValueError, SafetensorError, SyncError, Refused) as error:
            if attempt == ATTEMPTS - 1 or held[-1] in versions(folder):
                raise ValueError(f"--weights {folder}, version {held[-1]}: {error}") from error


async def _load(replica: Replica, stored: StoredVersion) -> None:
    places = {replica.name: [boxes_from_json(one["boxes"]) for one in replica.places]}
    ledger = Ledger(places, lora=stored.lora)
    found: dict[str, str] = {}
    await replica.weights_begin(stored.version, stored.manifest, stored.lora, {"name": "disk"})
    for path in stored.files:
        tensors = {
            name: tensor for name, tensor in load_file(path).items() if name in stored.manifest
        }
        found |= await asyncio.to_thread(fingerprints, tensors)
        await asyncio.to_thread(ledger.add, list(tensors.items()))
        await replica.weights_bucket_at(
            {"transport": "disk", "file": f"{path.parent.name}/{path.name}"}
        )
    torn = sorted(name for name, value in stored.fingerprints.items() if found.get(name) != value)
    if torn:
        raise ValueError(
            f"{len(torn)} tensors are not as they were written: {', '.join(torn[:3])}; the folder is torn"
        )
    CommitCheck(stored.version, ledger)(replica, await replica.weights_commit(stored.version))
