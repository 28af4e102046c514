"""Answer a Prometheus scraper: what a replica does, in text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from megadiff.rollout.server.replica import Replica

STATES = ("ready", "updating", "asleep")  # of rollout.server.policy


class ReplicaCollector(Collector):
    """Read the figures of a replica when they are asked for; nothing of it asks the engine."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """Yield each figure once, also where it is 0."""
        replica = self._replica
        load = replica.load
        yield InfoMetricFamily(
            "megadiff_replica",
            "The replica, and the run that it works for.",
            value={"replica": replica.spec.name, "run": replica.owner.run or ""},
        )

        num_waiting = load.num_calls - load.num_running
        yield _gauge("calls_running", "Calls in the engine.", load.num_running)
        yield _gauge("calls_waiting", "Calls that wait for the engine.", num_waiting)
        yield _gauge(
            "samples_outstanding", "Samples of all calls, waiting or running.", load.num_samples
        )
        yield CounterMetricFamily(
            "megadiff_samples_drawn", "Samples of calls that ended well.", value=load.num_drawn
        )
        yield CounterMetricFamily(
            "megadiff_calls_prepared",
            "Calls whose texts were encoded while the call before was drawn.",
            value=load.num_prepared,
        )
        yield CounterMetricFamily(
            "megadiff_drawing_seconds", "Seconds with a call in the engine.", value=load.busy_s
        )

        yield _gauge(
            "policy_version", "Version of the weights; -1: those on disk.", replica.policy.version
        )
        state = GaugeMetricFamily(
            "megadiff_state", "1 for the state that the weights are in.", labels=["state"]
        )
        for name in STATES:
            state.add_metric([name], float(replica.policy.state == name))
        yield state

        silent_s = replica.owner.silent_s
        if silent_s is not None:
            yield _gauge("owner_silent_seconds", "Seconds since the run was heard.", silent_s)

        yield from self._memory()

    def _memory(self) -> Iterator[Metric]:
        text = "Resident memory of the worker processes."
        yield _gauge("workers_resident_bytes", text, _children_bytes())

        # As of the last draw: to ask the worker now would wait for the call that it runs.
        memory = self._replica.gpu_bytes
        if memory is not None:
            allocated, reserved = memory
            yield _gauge("gpu_allocated_bytes", "Tensors on worker 0's GPU.", allocated)
            yield _gauge("gpu_reserved_bytes", "What its allocator keeps there.", reserved)


def replica_registry(replica: Replica) -> CollectorRegistry:
    """Return the registry of one replica: vLLM's own metrics are in the library's default one."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(replica))
    ProcessCollector(registry=registry)  # of the server: CPU, memory, descriptors
    return registry


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"megadiff_{name}", text, value=value)


def _children_bytes() -> int:
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            total += child.memory_info().rss
    return total
