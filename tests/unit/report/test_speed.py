"""The report's table of what the hardware gave."""

from megadiff.report.speed import charted, speed_table

ROWS = [
    {
        "step": step,
        "perf/mfu_train": 0.4 + step / 100,
        "perf/replica_idle_share": 0.2,
        "perf/replica_slowest_ratio": 1.25,
        "perf/replica_idle_share/replica_0": 0.1,
        "perf/replica_idle_share/replica_1": 0.3 * step,
    }
    for step in (1, 2, 3)
]


def test_medians_have_their_units_and_the_most_idle_replica_comes_first():
    assert speed_table(ROWS) == [
        ("What the hardware gave", "median"),
        ("MFU, training", "42 %"),
        ("Replicas idle, of rollout", "20 %"),
        ("Slowest replica, times the median", "1.25"),
        ("replica_1 idle, of rollout", "60 %"),
        ("replica_0 idle, of rollout", "10 %"),
    ]
    assert speed_table([{"step": 1, "reward/mean": 1.0}]) == []


def test_single_replicas_have_no_chart():
    assert charted(list(ROWS[0])) == [
        "step",
        "perf/mfu_train",
        "perf/replica_idle_share",
        "perf/replica_slowest_ratio",
    ]
