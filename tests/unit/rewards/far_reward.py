"""A remote reward and its server, in one process."""

from __future__ import annotations

import contextlib
import threading

from megadiff.config.rewards import RewardConfig
from megadiff.rewards.base import build_reward
from megadiff.rewards.remote import RemoteReward
from megadiff.rewards.server import ScoreServer


def remote(url, **arguments) -> RemoteReward:
    limits = {"timeout_s": 20.0, "deadline_s": 20.0, **arguments}
    return build_reward("far", RewardConfig(type="remote", args={"url": url, **limits}))


@contextlib.contextmanager
def serving(reward):
    """Yield the address at which a reward is served."""
    with ScoreServer(reward, host="127.0.0.1", port=0, token="") as server:
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
