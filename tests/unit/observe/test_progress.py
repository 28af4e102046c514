import io
import logging
import os
import subprocess
import sys

from megadiff.observe.progress import ProgressBar, step_summary

METRICS = {"reward/mean": -0.25, "time/rollout_s": 1.2, "time/sync_s": 0.0312}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_summary_leaves_out_what_is_missing():
    assert step_summary(METRICS) == "reward -0.25  rollout 1.2s  sync 0.0312s"
    assert step_summary({}) == ""


def test_without_a_terminal_each_step_is_one_record(caplog):
    with caplog.at_level(logging.INFO), ProgressBar(4, start_step=2, stream=io.StringIO()) as bar:
        bar.update(3, METRICS)
        bar.update(4, {})
    assert len(caplog.records) == 2
    assert caplog.messages[0].startswith("step 3/4  reward -0.25  rollout 1.2s") and "ETA" in caplog.messages[0]
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
