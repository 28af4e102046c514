"""Send a replica calls that wait for each other; their texts are encoded ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import httpx
import torch

from megadiff.rollout.client.client import ReplicaClient
from megadiff.types import RolloutRequest


def assert_waiting_calls_draw_alike(
    client: ReplicaClient, calls: Sequence[Sequence[RolloutRequest]]
) -> None:
    """Draw the calls alone and all at once, and compare every bit.

    The worker prepares each waiting call while it draws the one before.
    """
    alone = [client.draw(call).groups for call in calls]
    before = num_prepared(client)
    with ThreadPoolExecutor(len(calls)) as threads:
        together = [drawn.groups for drawn in threads.map(client.draw, calls)]
    for group, other in zip(chain(*alone), chain(*together), strict=True):
        assert torch.equal(group.latents_GSLC, other.latents_GSLC)
        assert torch.equal(group.pixels_GFHWC, other.pixels_GFHWC)
        for name, tensor in group.conditioning.items():
            assert torch.equal(tensor, other.conditioning[name])
    # not of each, where the server hears of a call's end too late
    assert before < num_prepared(client) <= before + len(calls) - 1


def num_prepared(client: ReplicaClient) -> int:
    """Return how many calls' texts the replica has encoded ahead."""
    text = httpx.get(f"{client.url}/metrics").text
    return int(float(text.split("\nmegadiff_calls_prepared_total ")[1].split()[0]))
