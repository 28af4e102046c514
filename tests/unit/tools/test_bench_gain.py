"""tools/bench_gain.py: settings and jobs, the clock of a run, figures, table and plot.

Its runs are stand-ins: a few lines of Python that write what a run writes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import bench_gain
import gain_curves
import gain_jobs
import pytest
from gain_curves import Point, RunResult

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs/shapes/flowgrpo.yaml")
LOG = """\
12:00:01 I megadiff.train.record: evaluation at step 0, 9.0 s: eval/shapes_strict 0.5
12:00:02 I megadiff.observe.progress: step 1/4  reward 0.5
12:00:09 I megadiff.train.record: evaluation at step 2, 3.0 s: eval/shapes_strict 0.7
12:00:10 W megadiff.observe.alarm: step 3: Reward rose by 0.2 while the colours fell. \
Look at the samples.
12:00:11 W megadiff.train.parity: step 3: not an alarm
12:00:12 I megadiff.train.record: evaluation at step 4, 4.0 s: eval/shapes_strict 0.9
"""
ROWS = [
    {"step": 0, "eval/shapes_strict": 0.5, "eval/colour_entropy_bit": 1.5},
    {"step": 1, "reward/mean": 0.5, "time/step_s": 2.0, "time/train_s": 1.0},
    {
        "step": 2,
        "reward/mean": 0.6,
        "time/step_s": 1.0,
        "eval/shapes_strict": 0.7,
        "eval/colour_entropy_bit": 1.2,
    },
    {"step": 3, "reward/mean": 0.7, "time/step_s": 1.0, "time/train_s": 0.5},
    {
        "step": 4,
        "reward/mean": 0.8,
        "time/step_s": 1.0,
        "eval/shapes_strict": 0.9,
        "eval/colour_entropy_bit": 0.9,
    },
]
STAMPS_S = {0: 20.0, 1: 22.5, 2: 27.0, 3: 28.5, 4: 34.0}


def result(
    *,
    setting: str = "base",
    seed: int = 0,
    scores: tuple[float, ...] = (0.5, 0.7, 0.9),
    **changes: object,
):
    points = [
        Point(
            step=100 * n,
            seconds=60.0 * n,
            train_s=50.0 * n,
            score=score,
            colour_entropy_bit=1.5 - n / 2,
            reward=0.5,
        )
        for n, score in enumerate(scores)
    ]
    plain = RunResult(
        setting=setting,
        seed=seed,
        arguments=[],
        metric="eval/shapes_strict",
        exit_code=0,
        error="",
        device="cpu",
        process_s=200.0,
        points=points,
        inside_s=0.4,
        stages_s={"time/step_s": 0.4},
        alarms=[],
    )
    return replace(plain, **changes)


def options(tmp_path: Path, *arguments: str):
    return bench_gain.parse([CONFIG, "--out", str(tmp_path), *arguments])


def test_settings_are_the_product_and_lists_are_one_value() -> None:
    found = gain_jobs.settings_of(["optim.lr=1,2", "rollout.sde_window_range=[0,5],[1,4]"])
    assert found == [
        ["optim.lr=1", "rollout.sde_window_range=[0,5]"],
        ["optim.lr=1", "rollout.sde_window_range=[1,4]"],
        ["optim.lr=2", "rollout.sde_window_range=[0,5]"],
        ["optim.lr=2", "rollout.sde_window_range=[1,4]"],
    ]
    assert gain_jobs.settings_of([]) == [[]]


@pytest.mark.parametrize(
    "varied", [["optim.lr"], ["optim.lr="], ["=1"], ["optim.lr=1", "optim.lr=2"]]
)
def test_a_bad_vary_is_refused(varied: list[str]) -> None:
    with pytest.raises(ValueError, match="--vary"):
        gain_jobs.settings_of(varied)


def test_jobs_are_settings_times_seeds_and_overrides_may_stand_anywhere(tmp_path: Path) -> None:
    arguments = options(
        tmp_path, "--vary", "algorithm.kl_coef=0,0.04", "--seeds", "3", "5", "train.num_steps=7"
    )
    jobs = gain_jobs.jobs_of(arguments)
    assert [(job.setting, job.seed) for job in jobs] == [
        ("kl_coef=0", 3),
        ("kl_coef=0", 5),
        ("kl_coef=0.04", 3),
        ("kl_coef=0.04", 5),
    ]
    assert jobs[3].arguments == [CONFIG, "train.num_steps=7", "algorithm.kl_coef=0.04"]
    assert jobs[3].command[-3:] == [
        f"run.dir={tmp_path}/runs",
        "run.name=kl_coef=0.04_seed5",
        "seed=5",
    ]
    assert {job.metric for job in jobs} == {"eval/shapes_strict"}
    assert len({job.folder for job in jobs}) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seed=3"], "--seeds"),
        (["--vary", "run.name=a,b"], "--out"),
        (["eval.every=0"], "eval.every"),
        (["optim.lrr=1"], "did you mean"),
        (["--metric", "eval/ocr"], "eval/shapes_strict"),
        (["--vary", "optim.lr=1,1"], "share a name"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_run_starts(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        gain_jobs.jobs_of(options(tmp_path, *arguments))


def test_the_clock_starts_with_the_first_step_and_stands_still_while_evaluating() -> None:
    points = gain_curves.points_of(ROWS, STAMPS_S, LOG, "eval/shapes_strict")
    assert [point.seconds for point in points] == [0.0, 2.5, 7.0, 8.5, 14.0]
    assert [point.train_s for point in points] == [
        0.0,
        2.5,
        4.0,
        5.5,
        7.0,
    ]  # 3 s of evaluation after step 2, 4 after 4
    assert [point.score for point in points] == [0.5, None, 0.7, None, 0.9]
    assert [point.reward for point in points] == [None, 0.5, 0.6, 0.7, 0.8]
    assert gain_curves.points_of([], {}, "", "eval/shapes_strict") == []


def test_alarms_and_errors_are_read_from_the_log() -> None:
    assert gain_curves.alarms_of(LOG) == [
        (3, "Reward rose by 0.2 while the colours fell. Look at the samples.")
    ]
    assert gain_curves.error_of("a\nerror: no such file\nlast words\n") == "error: no such file"
    assert gain_curves.error_of("a\nlast words\n\n") == "last words"
    assert gain_curves.error_of("") == ""


def test_figures() -> None:
    run = result(points=gain_curves.points_of(ROWS, STAMPS_S, LOG, "eval/shapes_strict"))
    run = replace(
        run, stages_s=gain_curves.stage_medians(ROWS), inside_s=gain_curves.mean_step_s(ROWS)
    )
    found = gain_curves.figures_of(run, 0.7)
    assert found is not None
    assert (found.start, found.end, found.entropy) == (0.5, 0.9, (1.5, 0.9))
    assert found.to_target is not None and (found.to_target.step, found.to_target.train_s) == (
        2,
        4.0,
    )
    assert found.step_s == 7.0 / 4
    assert found.between_s == 7.0 / 4 - 5.0 / 4
    assert run.stages_s == {"time/step_s": 1.0, "time/train_s": 0.75}


def test_a_target_that_is_not_reached_and_a_run_that_failed() -> None:
    found = gain_curves.figures_of(result(), 0.95)
    assert found is not None and found.to_target is None
    assert gain_curves.figures_of(result(exit_code=1), 0.5) is None
    assert gain_curves.figures_of(result(scores=(0.5,)), 0.5) is None


def test_the_table_has_a_row_a_setting_and_names_failures_and_alarms() -> None:
    runs = [
        result(seed=0),
        result(seed=1, scores=(0.5, 0.6, 0.7), alarms=[(150, "Colours fell.")]),
        result(setting="kl=1", exit_code=2, error="error: no such file", points=[]),
    ]
    lines = gain_curves.table(runs, target=0.8).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "base",
        "50.0 %",
        "80.0 % (90.0 %, 70.0 %)",
        "+30.0 points",
        "200, –",
        "100, –",
        "0.5",
        "1.50 → 0.50",
        "1 of 2, from step 150",
    ]
    assert lines[3].startswith("| kl=1 (1 of 1 failed) | – |")
    assert "- base, seed 1, step 150: Colours fell." in lines
    assert "- kl=1, seed 0: failed, exit code 2: error: no such file" in lines


def test_curves_are_mean_and_range_over_the_finished_seeds() -> None:
    runs = [
        result(),
        result(seed=1, scores=(0.4, 0.6)),
        result(seed=2, scores=(0.0, 0.0), exit_code=1),
    ]
    (found,) = gain_curves.curves(runs)
    assert found.steps == [0, 100] and found.seconds == [0.0, 50.0]  # what both have
    assert found.mean == pytest.approx([0.45, 0.65])
    assert (found.low, found.high) == ([0.4, 0.6], [0.5, 0.7])


@pytest.mark.parametrize(
    "runs",
    [[], [result()], [result(), result(setting="a<b & c"), result(seed=1, scores=(0.1,) * 5)]],
)
def test_the_plot_is_an_image_for_any_number_of_curves(runs: list[RunResult]) -> None:
    found = gain_curves.curves(runs)
    image = ElementTree.fromstring(gain_curves.plot(found, metric="eval/shapes_strict", target=0.8))
    lines = image.findall(".//{*}path[@style]")
    assert len(lines) == 4 * len(found)  # two panels, each with a line and a band


STAND_IN = """
import json, os, pathlib, sys, time
values = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
folder = pathlib.Path(values["run.dir"], values["run.name"])
folder.mkdir()
starts = folder.parent / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + values["run.name"] + "\\n")
(folder.parent / "pid").write_text(str(os.getpid()))
is_healthy = (folder.parent / "healthy").exists()
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(3):
        time.sleep(0.2)
        row = {"step": step, "eval/shapes_strict": step / 4, "time/step_s": 0.2}
        file.write(json.dumps(row) + "\\n")
        file.flush()
        if step == 1 and values["optim.lr"] == "2" and not is_healthy:
            sys.exit("error: learning rate")
        if step == 1 and values["optim.lr"] == "3" and not is_healthy:
            time.sleep(600)
"""


@pytest.fixture
def with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    real = gain_jobs.Job.command.fget
    monkeypatch.setattr(
        gain_jobs.Job,
        "command",
        property(lambda job: [sys.executable, str(script), *real(job)[4:]]),
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("with_stand_ins")
def test_a_failed_run_is_recorded_and_only_it_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        CONFIG,
        "--out",
        str(tmp_path / "out"),
        "--vary",
        "optim.lr=1,2",
        "--seeds",
        "0",
        "--parallel",
        "2",
    ]
    arguments.append("run.device=cpu")
    assert bench_gain.main(arguments) == 1
    record = json.loads((tmp_path / "out/gain.json").read_text())
    good, bad = record["runs"]
    assert (good["exit_code"], bad["exit_code"], bad["error"]) == (0, 1, "error: learning rate")
    assert [point["score"] for point in good["points"]] == [0.0, 0.25, 0.5]
    assert (
        0.3 < good["points"][2]["train_s"] < 5.0
    )  # two steps of 0.2 s, on a machine that may be busy
    assert bad["figures"] is None and good["figures"]["end"] == 0.5
    assert "lr=2 (1 of 1 failed)" in capsys.readouterr().out

    (tmp_path / "out/runs/healthy").touch()
    assert bench_gain.main(arguments) == 0
    starts = (tmp_path / "out/runs/starts").read_text().split()
    assert sorted(starts) == ["lr=1_seed0", "lr=2_seed0", "lr=2_seed0"]
    assert bench_gain.main([*arguments, "train.num_steps=9"]) == 2  # the same folder, other runs
    assert "another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("with_stand_ins")
def test_an_interrupt_stops_the_run_and_the_same_command_continues(tmp_path: Path) -> None:
    arguments = [
        CONFIG,
        "--out",
        str(tmp_path / "out"),
        "--vary",
        "optim.lr=1,3",
        "--seeds",
        "0",
        "run.device=cpu",
    ]
    runs = tmp_path / "out/runs"

    def interrupt_when_stuck() -> None:
        deadline_s = time.monotonic() + 30
        while not (runs / "lr=3_seed0/metrics.jsonl").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell that started the tests in the background has them ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt_when_stuck).start()
    try:
        assert bench_gain.main(arguments) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((runs / "pid").read_text()), 0)
    assert [
        run["setting"] for run in json.loads((tmp_path / "out/gain.json").read_text())["runs"]
    ] == ["lr=1"]

    (runs / "healthy").touch()
    assert bench_gain.main(arguments) == 0
    assert (runs / "starts").read_text().split() == ["lr=1_seed0", "lr=3_seed0", "lr=3_seed0"]


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_gain.locked(tmp_path):
        assert bench_gain.main([CONFIG, "--out", str(tmp_path), "run.device=cpu"]) == 2
    assert "in use by another benchmark" in capsys.readouterr().err
