import bench_observe
import pytest


def test_shares_are_of_the_steps_behind_the_warm_up():
    rows = [{"step": 0, "eval/mean": 1.0}]
    for step, seconds in enumerate((90.0, 80.0, 10.0, 12.0, 11.0), start=1):
        row = {"step": step, "time/step_s": seconds, "time/measure_s": seconds / 100}
        rows.append(row | {"time/record_s": 0.02 * step})
    assert bench_observe.overhead(rows, stage_s=1e-6) == pytest.approx(
        {"time/step_s": 11.0, "time/measure_s": 0.11, "time/record_s": 0.08, "timers": 3e-6}
    )
    with pytest.raises(ValueError, match="in 0 steps; give a run of 3 steps or more"):
        bench_observe.overhead(rows[:3], stage_s=1e-6)
    assert 0 < bench_observe.timer_s() < 1e-3
