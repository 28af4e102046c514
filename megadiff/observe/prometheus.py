"""Leave a run's newest figures where Prometheus finds them: RUN/metrics.prom.

node_exporter's textfile collector reads it. The run itself opens no port.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megadiff.observe.tracker import Tracker

logger = logging.getLogger(__name__)
PROM_NAME = "metrics.prom"
EVERY_S = 5.0  # below a scrape's usual 15 s; a file for each short step would cost more than it
PREFIX = "megadiff_run_"  # a replica's own metrics begin with megadiff_ alone
_OF_REPLICA = re.compile(r"(perf/replica_[a-z_]+)/(\w+)")


class PromTracker(Tracker):
    """Write the figures of the last step as gauges; a tracker. A failure only warns, once.

    The file is at most 5 s behind, and whole at the end.

    time/rollout_s becomes megadiff_run_time_rollout_s{run="NAME"}. What is of one replica has it as
    a label.
    """

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / PROM_NAME
        self._run = run_folder.resolve().name
        self._has_warned = False
        self._unwritten: Mapping[str, float] = {}
        self._next_s = 0.0  # before this moment nothing is written

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finished_s = time.time()
        self._unwritten = {
            "step": float(step),
            "step_finished_timestamp_seconds": finished_s,
            **metrics,
        }

        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        values = self._unwritten
        self._unwritten = {}
        if not values:
            return
        registry = CollectorRegistry()
        registry.register(_Gauges(values, run=self._run))
        try:
            # aside, and renamed
            write_to_textfile(str(self._path), registry)
        except OSError as error:  # such as a full disk: the run itself can go on
            if not self._has_warned:
                logger.warning("%s is out of date: %s", self._path, error)
            self._has_warned = True


class _Gauges(Collector):
    def __init__(self, values: Mapping[str, float], *, run: str) -> None:
        self._values = values
        self._run = run

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        names: dict[str, str] = {}
        for key, value in self._values.items():
            of_replica = _OF_REPLICA.fullmatch(key)
            # Without its replica, as the mean of all has that name already.
            name = f"{of_replica[1]}_of" if of_replica else key
            labels = {"run": self._run} | ({"replica": of_replica[2]} if of_replica else {})
            safe = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            # Of two keys with one such name the first is told: a reader may refuse a second family.
            if names.setdefault(safe, name) != name:
                continue
            if name not in families:
                text = f"{name} of the last finished step, as in metrics.jsonl."
                families[name] = GaugeMetricFamily(safe, text, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()
