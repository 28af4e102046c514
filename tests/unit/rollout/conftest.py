"""What tests of the watch over replicas share."""

from __future__ import annotations

import pytest

from megadiff.rollout.client import members as members_module
from megadiff.rollout.client import supervisor as supervisor_module


@pytest.fixture
def fast_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TICK_S", 0.05)
    monkeypatch.setattr(members_module, "FIRST_BACKOFF_S", 0.05)
