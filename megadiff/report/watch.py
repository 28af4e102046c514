"""Run `megadiff watch RUN`: a view of a run on a terminal, also over ssh."""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from megadiff.process.sigterm import ended_by_sigterm
from megadiff.report.run_follower import RunFollower
from megadiff.report.watch_frame import fitting_frame, frame

REDRAW_S = 1.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff watch",
        description="Show a run on the terminal, live or finished: curve, held-out scores, "
        "seconds by stage, alarms, events, last samples. Ends with q or Ctrl-C.",
    )
    parser.add_argument("run", type=Path, help="a run's folder, e.g. runs/quickstart")
    parser.add_argument(
        "--once", action="store_true", help="print it once, as where the output is no terminal"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Show the run until q or Ctrl-C; return 0, or 2 when RUN is no run."""
    args = build_parser().parse_args(argv)
    console = Console(highlight=False, markup=False, emoji=False)

    try:
        with no_notes(), suppress(KeyboardInterrupt):
            follower = RunFollower(args.run)
            if args.once or not sys.stdout.isatty() or console.is_dumb_terminal:
                # not by rich itself, which ends the process where a `| head` has ended
                with console.capture() as text:
                    console.print(frame(follower.look(), console.width))
                sys.stdout.write(text.get())
            else:
                _show(follower, console)
    except BrokenPipeError:
        raise  # the end of a `| head`, which the command line knows
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megadiff watch: {error}\n")
        return 2
    return 0


def _show(follower: RunFollower, console: Console) -> None:
    with (
        ended_by_sigterm(),  # so that the terminal is given back
        quit_key() as is_pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            drawn = fitting_frame(follower.look(), console, height=console.height)
            live.update(drawn, refresh=True)
            if is_pressed(REDRAW_S):
                return


@contextmanager
def no_notes() -> Iterator[None]:
    """Keep back warnings on half written files, which would stand in the middle of a frame."""
    logger = logging.getLogger("megadiff")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield what waits so many seconds and says whether q was pressed; other keys end the wait."""
    if not sys.stdin.isatty():
        yield _wait
        return

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    # Keys arrive without Enter; Ctrl-C still interrupts.
    tty.setcbreak(keyboard)

    try:
        yield lambda seconds: _has_quit(keyboard, seconds)
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _has_quit(keyboard: int, seconds: float) -> bool:
    readable, _, _ = select.select([keyboard], [], [], seconds)
    if not readable:
        return False
    pressed = os.read(keyboard, 1024)
    # Nothing to read: the terminal is gone.
    return not pressed or b"q" in pressed.lower()
