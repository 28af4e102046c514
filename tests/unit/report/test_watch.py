import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from synthetic_run import PROMPTS, metrics_of, write_run

from megadiff.observe.events import Events
from megadiff.observe.trackers import build_trackers
from megadiff.report import blocks
from megadiff.report.run_follower import MetricsFollower, RunFollower
from megadiff.report.watch import main
from megadiff.report.watch_frame import clean, eta_s, fitting_frame, frame, state_of


def text_of(folder: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(RunFollower(folder).look(), width))
    return console.file.getvalue()


def steps_of(follower: MetricsFollower) -> list[int]:
    return [row["step"] for row in follower.read()]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_frame_tells_all_and_keeps_to_its_width(tmp_path, width):
    folder = write_run(tmp_path / "run", steps=30, evaluated=True)
    Events(folder).write("replica_died", step=7, replica="replica_3", text="no memory")
    text = text_of(folder, width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    for words in ("step 30 of 60", "ETA", "Reward", "47.0 % → 62.0 %", "samples/s", "rollout"):
        assert words in text
    assert "step 7     replica died · replica_3 · no memory" in text
    assert "+7.9 to +22.1)" in text  # numbers are whole, names may be cut
    assert all(prompt[:12] in text for prompt in PROMPTS)
    assert "Alarms  none" in text


def test_no_colour_and_no_terminal_print_plain_text_once(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "run", steps=20)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "step 20 of 60" in text
    assert max(map(cell_len, text.splitlines())) <= 60


def test_alarms_are_shown_with_what_to_do(tmp_path):
    with build_trackers([], tmp_path, {}) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, metrics_of(step, num_steps=3) | {"reward/zero_std_ratio": 0.9})
    (tmp_path / "config.yaml").write_text("train: {num_steps: 3}\n")
    assert "! 90% of the groups have equal rewards" in text_of(tmp_path)


def test_a_run_that_has_not_begun_and_folders_that_are_none(tmp_path, capsys):
    runs = tmp_path / "runs"
    begun = runs / "a"
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text("train: {num_steps: 9}\n")
    text = text_of(begun)
    assert "No step is finished yet." in text and "step 0 of 9" in text and "running" in text

    assert main([str(runs)]) == 2
    assert "it holds runs, give one of them: a" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), "--once"]) == 2
    assert "is no folder; give a run's folder" in capsys.readouterr().err
    (begun / "config.yaml").write_text("reward: 5\ntrain: [")
    assert "No step is finished yet." in text_of(begun)
    for odd in ("reward: 5\ntrain: 6\n", "train: {num_steps: .inf}\n"):
        (begun / "config.yaml").write_text(odd)
        assert "No step is finished yet." in text_of(begun)
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "neither config.yaml nor metrics.jsonl" in capsys.readouterr().err


def test_lines_are_followed_torn_and_cut_ones_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.read() == []
    with build_trackers([], tmp_path, {}) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"reward/mean": step / 4})
            assert steps_of(follower) == list(range(1, step + 1))

    with path.open("a") as file:
        file.write('{"step": 4, "reward/me')
        file.flush()
        assert steps_of(follower) == [1, 2, 3]
        file.write('an": 1.0}\n')
    assert follower.read()[-1] == {"step": 4, "reward/mean": 1.0}

    # a resumed run cuts steps 3 and 4, and writes them anew
    with build_trackers([], tmp_path, {}, resume_step=2) as trackers:
        assert steps_of(follower) == [1, 2]
        trackers.log(3, {"reward/mean": 9.0})
    assert [row["reward/mean"] for row in follower.read()] == [0.25, 0.5, 9.0]
    path.unlink()
    assert follower.read() == []


def test_a_look_sees_what_came_since_the_last(tmp_path):
    folder = write_run(tmp_path / "run", steps=10, evaluated=True)
    follower = RunFollower(folder)
    before = follower.look()
    write_run(tmp_path / "longer", steps=20, evaluated=True)
    (folder / "metrics.jsonl").unlink()
    for name in ("metrics.jsonl", "evaluations/step_000020", "samples/step_000020"):
        (tmp_path / "longer" / name).rename(folder / name)
    after = follower.look()
    assert (before.last_step, after.last_step) == (10, 20)
    assert [evaluation.step for _, evaluation in after.evaluations] == [0, 20]
    assert {sample.step for sample in after.samples} == {20}
    assert follower.look().samples is after.samples  # not read again


def test_the_state_is_that_of_the_last_turn(tmp_path):
    folder = write_run(tmp_path / "run", steps=60)
    now = time.time()
    assert state_of(RunFollower(folder).look(), now=now)[0] == "finished"
    for kind in ("run_started", "run_stopped", "run_resumed", "run_finished"):
        Events(folder).write(kind, step=1)
        expected = "running" if kind in ("run_started", "run_resumed") else kind[4:]
        assert state_of(RunFollower(folder).look(), now=now)[0] == expected
    view = RunFollower(write_run(tmp_path / "live", steps=5)).look()
    assert state_of(view, now=now + 30)[0] == "running"
    assert state_of(view, now=now + 3600) == ("silent", "last line 1 h 00 min ago")


def test_a_run_that_resumes_loads_before_its_first_line(tmp_path):
    folder = write_run(tmp_path / "run", steps=5)
    os.utime(folder / "metrics.jsonl", (time.time() - 18_000,) * 2)
    Events(folder).write("run_resumed", step=6)
    view = RunFollower(folder).look()
    assert state_of(view, now=time.time() + 15)[0] == "running"
    assert state_of(view, now=time.time() + 200_000)[0] == "silent"


def test_the_eta_counts_steps_and_evaluations_that_are_left(tmp_path):
    view = RunFollower(write_run(tmp_path / "run", steps=5)).look()
    rows = [{"step": step, "time/step_s": 2.0} for step in range(1, 6)]
    rows[0]["time/evaluate_s"] = 30.0
    # to step 9: an evaluation at 8 and one at the end
    config = {"train": {"num_steps": 9}, "eval": {"every": 4}}
    assert eta_s(replace(view, rows=rows, settings=config)) == 4 * 2 + 2 * 30
    assert eta_s(replace(view, rows=[], settings=config)) is None


@pytest.mark.parametrize("height", [12, 24, 40, 100])
def test_a_frame_fits_the_terminal(tmp_path, height):
    folder = write_run(tmp_path / "run", steps=30, evaluated=True)
    Events(folder).write("run_started")
    console = Console(file=io.StringIO(), width=80)
    console.print(fitting_frame(RunFollower(folder).look(), console, height=height))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= max(height, 17)
    assert any("Samples" in line for line in lines) == (height >= 24)


def test_a_prompt_cannot_command_the_terminal(tmp_path):
    assert clean("a\x1b[2Jb\n\tc [red]d[/red]") == "a [2Jb c [red]d[/red]"


def test_curves_of_blocks():
    lines, axis = blocks.plot([0.0, 0.5, 1.0, None], width=4, height=2)
    assert axis.low == 0 and [len(line) for line in lines] == [4, 4]
    assert lines[1][0] == "▁" and lines[1][3] == lines[0][3] == " "
    assert lines[1][2] == "█" and lines[0][2] in "▆▇"
    assert blocks.sparkline([1, None, 8], 10) == "▁ █"
    assert len(blocks.sparkline(range(100), 10)) == 10
    assert blocks.sparkline([2, 2], 10) == "▅▅"
    assert blocks.resampled([1, 3, 5, 7], 2) == [2, 6]
    assert blocks.bar(0.5, 4) == "██" and blocks.bar(2.0, 3) == "███"


@pytest.mark.slow
@pytest.mark.parametrize("end", [b"q", signal.SIGINT, signal.SIGTERM])
def test_a_live_view_ends_with_q_or_a_signal_and_gives_the_terminal_back(tmp_path, end):
    import termios

    folder = write_run(tmp_path / "run", steps=3)
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, "-m", "megadiff.cli.main", "watch", str(folder)],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"},
    )
    shown = wait_for(keyboard, b"step 3 of 60")
    with build_trackers([], folder, {}, resume_step=3) as trackers:
        trackers.log(4, metrics_of(4, num_steps=60))
    shown += wait_for(keyboard, b"step 4 of 60")
    if isinstance(end, bytes):
        os.write(keyboard, end)
    else:
        process.send_signal(end)
    shown += wait_for(keyboard, b"\x1b[?1049l")  # back from the alternate screen
    _, errors = process.communicate(timeout=30)
    code = 143 if end == signal.SIGTERM else 0
    assert (process.returncode, errors) == (code, b"")
    assert b"\x1b[?1049h" in shown and termios.tcgetattr(terminal) == before


def wait_for(keyboard: int, words: bytes) -> bytes:
    shown = b""
    deadline = time.monotonic() + 60
    while words not in shown and time.monotonic() < deadline:
        if select.select([keyboard], [], [], 1)[0]:
            shown += os.read(keyboard, 65536)
    assert words in shown
    return shown
