"""Say which share of a run's steps its own figures take: `python tools/bench_observe.py RUN`.

Any run will do, as each row of metrics.jsonl says what its figures took: time/measure_s within the
step, and time/record_s behind the step before. Medians, without the first two steps. Not counted
are saved samples, evaluations, traced steps, and threads beside the training: one looks at the
samples, on GPUs one watches their memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megadiff.observe.metrics import Rows, column, median, read_rows
from megadiff.observe.timers import Timers
from megadiff.observe.trackers import METRICS_NAME

WARM_UP = 2
REPEATS = 20_000


def timer_s() -> float:
    """Return what one timed stage costs."""
    timers = Timers()
    start_s = time.perf_counter()
    for _ in range(REPEATS):
        with timers("stage"):
            pass
    return (time.perf_counter() - start_s) / REPEATS


def overhead(rows: Rows, *, stage_s: float) -> dict[str, float]:
    """Return seconds of each part of a step's figures, and of the whole step.

    stage_s: of one timer. Raises ValueError for a run of too few steps.
    """
    rows = [row for row in rows if row.get("time/step_s")][WARM_UP:]
    parts = {}
    for key in ("time/step_s", "time/measure_s", "time/record_s"):
        value = median(column(rows, key))
        if value is None:
            raise ValueError(f"no {key} in {len(rows)} steps; give a run of 3 steps or more")
        parts[key] = value
    num_timers = sum(key.startswith("time/") for key in rows[-1])
    return parts | {"timers": num_timers * stage_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    rows = read_rows(parser.parse_args().run / METRICS_NAME)
    parts = overhead(rows, stage_s=timer_s())
    step_s = parts.pop("time/step_s") + parts["time/record_s"]
    for name, seconds in parts.items():
        sys.stdout.write(f"{name:16} {1e3 * seconds:8.2f} ms  {seconds / step_s:.3%}\n")
    total_s = sum(parts.values())
    sys.stdout.write(
        f"{'all figures':16} {1e3 * total_s:8.2f} ms  {total_s / step_s:.3%} of {step_s:.3f} s\n"
    )


if __name__ == "__main__":
    main()
