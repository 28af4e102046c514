"""Show what the hardware gave: rates, power, and how evenly the replicas worked."""

from __future__ import annotations

from collections.abc import Iterable

from megadiff.observe.metrics import Rows, column, median, metric_keys, pretty_number

REPLICA = "perf/replica_"  # with a replica's name behind a second slash

# Key → (what it is, factor, unit), in the order of the table.
FIGURES = {
    "perf/samples_per_s": ("Samples a second, of the whole step", 1, ""),
    "perf/device_s_per_sample": ("GPU seconds a sample", 1, "s"),
    "perf/images_per_s": ("Images a second of rollout", 1, ""),
    "perf/tokens_per_s_rollout": ("Tokens a second, rollout", 1, ""),
    "perf/tokens_per_s_train": ("Tokens a second, training", 1, ""),
    "perf/tflops_rollout": ("TFLOP/s of a GPU, rollout", 1, ""),
    "perf/tflops_train": ("TFLOP/s of a GPU, training", 1, ""),
    "perf/mfu_rollout": ("MFU, rollout", 100, "%"),
    "perf/mfu_train": ("MFU, training", 100, "%"),
    "perf/power_w": ("Power of a GPU, over the whole step", 1, "W"),
    "perf/replica_idle_share": ("Replicas idle, of rollout", 100, "%"),
    "perf/replica_queue_s": ("A call waits at a replica", 1, "s"),
    "perf/replica_slowest_ratio": ("Slowest replica, times the median", 1, ""),
}
MOST_REPLICAS = 8  # of the table, the most idle ones


def speed_table(rows: Rows) -> list[tuple[str, str]]:
    """Return (what it is, median with its unit) of every figure that the run has, under a head."""
    table = []

    for key, (label, factor, unit) in FIGURES.items():
        value = median(column(rows, key))
        if value is not None:
            table.append((label, f"{pretty_number(factor * value)} {unit}".rstrip()))

    idle: dict[str, float] = {}
    for key in metric_keys(rows):
        value = median(column(rows, key))
        if key.startswith("perf/replica_idle_share/") and value is not None:
            idle[key.rpartition("/")[2]] = value
    for name in sorted(idle, key=lambda name: -idle[name])[:MOST_REPLICAS]:
        table.append((f"{name} idle, of rollout", f"{pretty_number(100 * idle[name])} %"))
    return [("What the hardware gave", "median"), *table] if table else []


def charted(keys: Iterable[str]) -> list[str]:
    """Return the metrics that have a chart: those of single replicas are in the table alone."""
    return [key for key in keys if not (key.startswith(REPLICA) and key.count("/") > 1)]
