"""Trace the run's own replicas beside the trainer, in the steps of observe.profile_steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.client.fleet import Fleet

logger = logging.getLogger(__name__)


@contextmanager
def traced_replicas(fleet: Fleet, folder: Path) -> Iterator[None]:
    """Write <replica>.json.gz of what each replica's first worker does in the block.

    For replicas that end with this run alone: nobody would end the trace of others. One that fails
    only warns.
    """
    clients = [client for client in fleet.replicas if _begin(client)]
    yield

    for client in clients:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{client.name}.json.gz").write_bytes(client.trace_end())
        except (ReplicaError, OSError) as error:
            logger.warning("no trace of %s: %s", client.name, error)


def _begin(client: ReplicaClient) -> bool:
    try:
        client.trace_begin()
    except ReplicaError as error:
        logger.warning("no trace of %s: %s", client.name, error)
        return False
    return True
