"""Measure each model's activations once for all plans of a test process."""

from __future__ import annotations

from functools import cache

import pytest

from megadiff.models.registry import build_adapter

shared_adapter = cache(build_adapter)


@pytest.fixture(autouse=True)
def adapters_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are kept by adapter, and take seconds for a model of full size."""
    monkeypatch.setattr("megadiff.planner.command.build_adapter", shared_adapter)
