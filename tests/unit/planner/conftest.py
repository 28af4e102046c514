"""Every test of the planner shares adapters."""

from tests.unit.shared_adapters import adapters_are_shared

__all__ = ["adapters_are_shared"]
