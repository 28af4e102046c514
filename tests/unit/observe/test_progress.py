import io
import logging
import os
import subprocess
import sys
import time

import pytest

from megadiff.observe.progress import ProgressBar, step_summary

METRICS = {"reward/mean": -0.25, "time/rollout_s": 1.2, "time/sync_s": 0.0312}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_summary_leaves_out_what_is_missing():
    assert step_summary(METRICS) == "reward -0.25  rollout 1.2s  sync 0.0312s"
    assert step_summary({}) == ""


def test_summary_ends_with_how_fast_it_is():
    """MFU where the peak is known, else TFLOP/s; of rollout and training."""
    speed = {"perf/samples_per_s": 3.371, "perf/tflops_rollout": 410.0, "perf/tflops_train": 390.0}
    assert step_summary(speed) == "3.37 samples/s  410/390 TFLOP/s"
    shares = {"perf/mfu_rollout": 0.414, "perf/mfu_train": 0.394}
    assert step_summary(speed | shares) == "3.37 samples/s  41.4/39.4 % MFU"
    assert step_summary({"perf/tflops_train": 0.04}) == "0.04 TFLOP/s"


def test_a_supervised_step_shows_its_loss():
    assert step_summary({"loss/flow_matching": 0.5, "time/data_s": 0.01}) == "loss 0.5  data 0.01s"
    assert step_summary(METRICS | {"loss/flow_matching": 0.5}).startswith("reward -0.25  rollout")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_comes_before_the_first_step_does_not_count(stream, monkeypatch, caplog):
    """An hour of loading and evaluating, then steps of 2 s."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    with caplog.at_level(logging.INFO), ProgressBar(11, start_step=1, stream=stream()) as bar:
        now[0] += 3600 + 2
        bar.update(2, {"time/step_s": 2.0})
        assert bar._remaining_s(2) == 18.0
        now[0] += 2
        bar.update(3, {"time/step_s": 2.0})
        assert bar._remaining_s(3) == 16.0
        if stream is Terminal:
            assert bar._bar.start_t == 4600.0
    assert stream is Terminal or caplog.messages[0].endswith("ETA 18.0 s")


def test_without_a_terminal_each_step_is_one_record(caplog):
    with caplog.at_level(logging.INFO), ProgressBar(4, start_step=2, stream=io.StringIO()) as bar:
        bar.update(3, METRICS)
        bar.update(4, {})
    assert len(caplog.records) == 2
    assert (
        caplog.messages[0].startswith("step 3/4  reward -0.25  rollout 1.2s")
        and "ETA" in caplog.messages[0]
    )
    assert caplog.messages[1].endswith("ETA 0.00 s")


def test_on_a_terminal_a_bar_counts_from_the_resumed_step():
    terminal = Terminal()
    with ProgressBar(10, start_step=4, stream=terminal) as bar:
        bar.update(5, METRICS)
    assert "5/10" in terminal.getvalue() and "reward -0.25" in terminal.getvalue()


def test_a_closed_stderr_does_not_break_the_run():
    code = (
        "import sys; from megadiff.observe.progress import ProgressBar\n"
        "sys.stderr.close()\n"
        "with ProgressBar(1) as bar: bar.update(1, {'reward/mean': 1.0})\n"
        "sys.stdout.write('done')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (run.returncode, run.stdout) == (0, "done")
