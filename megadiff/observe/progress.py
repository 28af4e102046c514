"""Show how a run is doing: a bar on a terminal, a log line per step elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from megadiff.observe.metrics import (
    LOSS,
    STAGES,
    format_number,
    format_seconds,
    stage_key,
    step_seconds,
)

logger = logging.getLogger(__name__)


def step_summary(metrics: Mapping[str, float]) -> str:
    """Write a step's reward, or without one its loss, its seconds per stage, and its speed."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {format_number(metrics['reward/mean'])}")
    elif LOSS in metrics:
        parts.append(f"loss {format_number(metrics[LOSS])}")

    for stage in STAGES:
        seconds = metrics.get(stage_key(stage))
        if seconds is not None:
            parts.append(f"{stage} {format_number(seconds)}s")

    return "  ".join(parts + _speed(metrics))


def _speed(metrics: Mapping[str, float]) -> list[str]:
    """Return samples a second, and MFU of rollout / training, or TFLOP/s without a known peak."""
    parts = []
    if "perf/samples_per_s" in metrics:
        parts.append(f"{format_number(metrics['perf/samples_per_s'])} samples/s")

    for kind, factor, unit in (("mfu", 100, "% MFU"), ("tflops", 1, "TFLOP/s")):
        rates = [metrics.get(f"perf/{kind}_{stage}") for stage in ("rollout", "train")]
        shown = [format_number(factor * rate) for rate in rates if rate is not None]
        if shown:
            parts.append(f"{'/'.join(shown)} {unit}")
            break

    return parts


class ProgressBar:
    """Show steps start_step+1 … num_steps of a run on `stream`; stdout stays free for data.

    Its clock starts with the first step: what comes before (replicas that start, the first
    evaluation) comes once. Without a terminal each step is one INFO record of this module's
    logger, so that a captured or redirected run has lines, not carriage returns.
    """

    def __init__(
        self, num_steps: int, *, start_step: int = 0, stream: TextIO | None = None
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._num_steps = num_steps
        self._start_step = start_step
        self._start_s: float | None = None  # of the first step

        self._bar: tqdm | None = None
        if not stream.closed and stream.isatty():
            self._bar = tqdm(
                total=num_steps, initial=start_step, file=stream, unit="step", dynamic_ncols=True
            )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is finished, with its metrics."""
        # The first step has ended by now: its own seconds say when it began.
        if self._start_s is None:
            seconds_ago = step_seconds(metrics) or 0.0
            self._start_s = time.monotonic() - seconds_ago
            if self._bar is not None:
                # tqdm counts in time.time().
                self._bar.start_t = time.time() - seconds_ago
                self._bar.last_print_t = self._bar.start_t

        if self._bar is not None:
            self._bar.set_postfix_str(step_summary(metrics), refresh=False)
            self._bar.update(step - self._bar.n)
            return

        summary = step_summary(metrics)
        remaining = format_seconds(self._remaining_s(step))
        logger.info("step %d/%d  %s  ETA %s", step, self._num_steps, summary, remaining)

    def _remaining_s(self, step: int) -> float:
        """Return steps left × mean seconds of the steps that this process finished."""
        # Not num_steps done in all: a resumed run spent no time on the earlier ones.
        finished = max(1, step - self._start_step)
        assert self._start_s is not None
        return (time.monotonic() - self._start_s) / finished * max(0, self._num_steps - step)
