"""What is shown of a replica that died."""

from __future__ import annotations

from pathlib import Path

from megadiff.rollout.processes import LOG_TAIL_LINES, log_tail


def test_the_end_of_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_text("".join(f"line {place}\n" for place in range(1000)))
    assert log_tail(log).splitlines() == [f"  | line {place}" for place in range(1000 - LOG_TAIL_LINES, 1000)]


def test_of_a_crash_what_came_before_it_and_who_crashed(tmp_path: Path) -> None:
    """Behind it follow all threads' stacks and the names of all extension modules."""
    log = tmp_path / "log"
    stacks = "".join(f'Thread {place} (most recent call first):\n  File "a.py", line 1 in f\n' for place in range(50))
    modules = "Extension modules: " + ", ".join(f"package.module_{place}" for place in range(1000))
    crash = "Fatal Python error: Aborted\n\nCurrent thread 7 (most recent call first):\n"
    log.write_text("loading\n" * 1000 + f"c10::Error: an illegal memory access\n{crash}{stacks}{modules}\n")
    shown = log_tail(log)
    assert "illegal memory access" in shown and "Current thread 7" in shown and "Extension modules" not in shown
    assert len(shown.splitlines()) == 2 * LOG_TAIL_LINES
