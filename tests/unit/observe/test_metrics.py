import json
import math

import pytest

from megadiff.observe.metrics import (
    check_keys,
    format_number,
    format_seconds,
    median,
    merge,
    read_rows,
    run_seconds,
    step_seconds,
    verdict,
)


@pytest.mark.parametrize(
    "key", ["reward", "Reward/mean", "reward/", "reward/a b", "reward/a/b/c", "step"]
)
def test_a_key_that_is_not_area_and_quantity_is_named(key):
    with pytest.raises(ValueError, match=f"'{key}'"):
        check_keys(["reward/mean", key])


def test_merge_refuses_to_hide_a_metric():
    assert merge({"a/x": 1.0}, {"b/x": 2.0}) == {"a/x": 1.0, "b/x": 2.0}
    with pytest.raises(ValueError, match="a/x"):
        merge({"a/x": 1.0}, {"a/x": 2.0})


def test_median_looks_at_finite_values_only():
    assert median([3.0, None, math.nan, 1.0, math.inf, 2.0]) == 2.0
    assert median([None, math.nan]) is None


def test_rows_survive_torn_lines_repeats_and_disorder(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 2, "a/x": 2}',
        "",
        '{"step": 1, "a/x": NaN}',
        "[1]",
        '{"a/x": 3}',
        '{"step": 2, "b/y": 5, "s": "t"}',
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n{"step": 3, "a/\xe4')
    assert read_rows(path) == [{"step": 1, "a/x": None}, {"step": 2, "a/x": 2, "b/y": 5}]
    assert read_rows(tmp_path / "nowhere.jsonl") == []


def test_verdict_compares_ends_of_equal_length_that_do_not_overlap():
    rows = [{"step": step, "reward/mean": float(step)} for step in range(1, 21)]
    ends = verdict(rows)
    assert (ends.first, ends.last, ends.gain, ends.window) == (3.0, 18.0, 15.0, 5)
    assert ends.noise == pytest.approx(math.sqrt(2.5)) and ends.is_clear
    assert verdict(rows[:3]).window == 1 and verdict(rows[:3]).noise is None
    assert verdict(rows[:1]).gain == 0.0
    assert verdict([{"step": 1, "reward/mean": None}]) is None


def test_a_gain_within_the_noise_is_not_clear():
    rows = [{"step": step, "reward/mean": 0.5 + 0.1 * (step % 2)} for step in range(1, 21)]
    assert not verdict(rows).is_clear


def test_nothing_is_clear_before_ten_steps():
    """Two steps are alike by chance far too often to say how noisy a step is."""
    rows = [{"step": step, "reward/mean": step + 0.1 * (step % 2)} for step in range(1, 11)]
    assert [verdict(rows[:length]).is_clear for length in (4, 8, 9, 10)] == [False] * 3 + [True]
    assert verdict(rows[:9]).noise is None


def test_a_step_without_its_total_lasts_as_long_as_its_stages():
    assert step_seconds({"step": 1, "time/rollout_s": 1.0, "time/train_s": 2.0}) == 3.0
    assert step_seconds({"step": 1, "time/rollout_s": 1.0, "time/step_s": 4.0}) == 4.0
    assert step_seconds({"step": 1}) is None


@pytest.mark.parametrize(
    "value, text",
    [
        (0.61234, "0.612"),
        (0.0, "0"),
        (1.2e-5, "1.2e-5"),
        (-3.456e-7, "-3.46e-7"),
        (1234.5, "1234"),
        (2e6, "2e6"),
        (0.1, "0.1"),
        (100.0, "100"),
        (None, "n/a"),
        (math.nan, "n/a"),
        (0.99999, "1"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0.123, "0.12 s"), (12.34, "12.3 s"), (245, "4 min 05 s"), (11520, "3 h 12 min")],
)
def test_seconds_are_said_as_people_do(seconds, text):
    assert format_seconds(seconds) == text


def test_numbers_are_ascii_so_that_any_terminal_takes_them():
    assert json.dumps(format_number(-1e-9)) == '"-1e-9"'


def test_a_run_lasts_as_long_as_its_steps_and_evaluations():
    rows = [
        {"step": 0, "time/evaluate_s": 100.0},
        {"step": 1, "time/step_s": 10.0},
        {"step": 2, "time/step_s": 10.0, "time/evaluate_s": 100.0},
    ]
    assert run_seconds(rows) == 220.0
    assert run_seconds(rows[:1]) is None and run_seconds([]) is None
