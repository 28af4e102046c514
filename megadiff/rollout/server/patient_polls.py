"""Let an idle engine rest: vllm-omni asks its queues for results every millisecond.

That costs 8 to 15 % of a core for each replica, also while trainers need the cores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any

SHORT_S = 0.002  # a shorter sleep is a poll's
LATER_SHARE = 0.02  # a result that took a second is seen at most 20 ms later
LONGEST_S = 0.01


class PatientAsyncio:
    """Stand for the module asyncio, whose polls become rarer the longer they find nothing.

    For the loops of one thread. A poll that found something sleeps for 0 s in vllm-omni.
    """

    def __init__(self) -> None:
        self._idle_since: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def sleep(self, delay: float, result: Any = None) -> Coroutine[Any, Any, Any]:
        """Return what asyncio.sleep returns, for a delay of at most LONGEST_S where it polls."""
        if delay <= 0:
            self._idle_since = None
        elif delay < SHORT_S:
            now = time.monotonic()
            if self._idle_since is None:
                self._idle_since = now
            idle_s = now - self._idle_since
            delay = max(delay, min(LATER_SHARE * idle_s, LONGEST_S))
        return asyncio.sleep(delay, result)


def poll_patiently(orchestrator: Any) -> None:
    """Make vllm-omni wait for events where it can, and poll ever more rarely elsewhere.

    orchestrator: the module vllm_omni.engine.orchestrator. A second call does nothing.
    """
    # Of 0.28: the server waits for outputs in a thread of its own. 0.26 does not know it.
    os.environ.setdefault("VLLM_OMNI_EVENT_DRIVEN_ORCH", "1")
    if not isinstance(orchestrator.asyncio, PatientAsyncio):
        orchestrator.asyncio = PatientAsyncio()
