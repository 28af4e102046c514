"""Hear that a run should end: by a signal, or by the file `stop` in the run's folder.

A launcher asks by the file, because SIGUSR1 kills torchrun and does not reach its ranks. The file's
text is the number of seconds that are left, 240 where it is empty. A run that ended on request
leaves the file `stopped`, because torchrun turns every exit code into 1.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import psutil

from megadiff.observe.step_folders import step_folders
from megadiff.observe.text_files import write_whole
from megadiff.process.lifeline import kill_children, launcher_pid

logger = logging.getLogger(__name__)
STOP = "stop"
STOPPED = "stopped"
GRANT_S = 240.0  # of a request that names no time, as SIGUSR1 does
GRACE_VARIABLE = "MEGADIFF_STOP_GRACE_S"  # seconds that SIGTERM grants; without it none are known
LISTEN_S = 1.0  # between two looks
AGAIN_S = 2.0  # a second request after this ends the process; torchrun repeats a Ctrl-C at once
TORN_S = 0.5  # an empty file that is younger may be one that is being written
FINISH_S = 10.0  # for ranks to finish the step that they are in, where none of them has failed
SAVE_GUESS_S = 30.0  # a checkpoint, as long as this attempt has written none
LEAVE_S = 10.0  # for the main thread to leave; then the process ends where it stands
CLOSE_S = 60.0  # for all to be closed after an early end
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """One request to end. grant_s: seconds that are left, 0 where nobody knows."""

    reason: str
    exit_code: int
    grant_s: float = 0.0


def stopped_code() -> int:
    """Return the exit code of a run that ended on request: 75, EX_TEMPFAIL, "try again later".

    It is 0 under torchrun with restarts left, which would start the run again after any other.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < restarts:
        return 0
    return os.EX_TEMPFAIL


def sigterm_grant_s() -> float:
    """Return MEGADIFF_STOP_GRACE_S. Raises ValueError where it is no number of seconds."""
    text = os.environ.get(GRACE_VARIABLE) or "0"
    grant_s = _seconds(text)
    if grant_s is None:
        raise ValueError(f"{GRACE_VARIABLE}={text!r} is no number of seconds; set one, or unset it")
    return grant_s


def signal_request(number: int) -> StopRequest:
    name = signal.Signals(number).name
    if number == signal.SIGUSR1:
        return StopRequest(reason=name, exit_code=stopped_code(), grant_s=GRANT_S)
    grant_s = sigterm_grant_s() if number == signal.SIGTERM else 0.0
    return StopRequest(reason=name, exit_code=128 + number, grant_s=grant_s)


class StopFiles:
    """The files `stop` and `stopped` of one run folder. For rank 0, under the run's lock.

    start_s: when the attempt began.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = 0  # the newest request's time of change
        # torchrun's own start: ranks that it starts again are of the attempt that was asked
        self.start_s = psutil.Process(launcher_pid()).create_time()

    def begin(self) -> None:
        """Remove what earlier attempts left, but not a request to the one that begins."""
        (self._folder / STOPPED).unlink(missing_ok=True)
        stop = self._folder / STOP
        # A launcher may have asked while this process imported.
        if stop.is_file() and stop.stat().st_mtime < self.start_s:
            stop.unlink(missing_ok=True)

    def look(self) -> StopRequest | None:
        """Return a request that was not there at the last look."""
        path = self._folder / STOP
        try:
            changed_ns = path.stat().st_mtime_ns
            if changed_ns == self._seen:
                return None
            text = path.read_bytes()[:100].decode("utf-8", "replace").strip()
        except OSError:  # none there, in most cases
            return None

        age_s = max(0.0, time.time() - changed_ns / 1e9)
        if not text and age_s < TORN_S:
            return None
        self._seen = changed_ns
        grant_s = _seconds(text) if text else GRANT_S
        if grant_s is None:
            logger.warning("%s holds %r, no number of seconds; taken as %.0f", path, text, GRANT_S)
            grant_s = GRANT_S
        # Over NFS a new file may stay unseen for a minute.
        return StopRequest(
            reason=f"{path} asks to stop",
            exit_code=stopped_code(),
            grant_s=max(0.0, grant_s - age_s),
        )

    def obeyed(self, *, reason: str, exit_code: int) -> None:
        """Say in `stopped` that a request was obeyed, and from which step the run goes on.

        Not after SIGTERM: somebody may want the run to end for good, or torchrun sends it because
        another rank has failed.
        """
        if exit_code != stopped_code():
            return
        steps = [step for step, _ in step_folders(self._folder / "checkpoints")]
        began = datetime.fromtimestamp(self.start_s).astimezone().isoformat(timespec="seconds")
        newest = max(steps, default=0)
        row = {"step": newest, "attempt": began, "reason": reason}
        try:
            write_whole(self._folder / STOPPED, json.dumps(row) + "\n")
            (self._folder / STOP).unlink(missing_ok=True)
        except OSError:  # the run is saved all the same, and must end
            logger.exception("%s could not be written", self._folder / STOPPED)


class SignalPipe:
    """Hand signals to a thread. The main one may sit in a collective, where no handler runs."""

    def __init__(self) -> None:
        # set_wakeup_fd() takes a non-blocking descriptor only
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Not by whoever stops listening: a thread may still wait here, and the number of a closed
        # descriptor is soon another file's. Such a thread refers to this object.
        for descriptor in self._pipe:
            finalizer = weakref.finalize(self, os.close, descriptor)
            finalizer.atexit = False  # daemon threads wait here until the process is gone

    def open(
        self, handler: Callable[[int, object], None], numbers: Sequence[int] = SIGNALS
    ) -> None:
        """Hear signals from now on. Called by the main thread."""
        # C code writes the signal's number here, also where the handler itself never runs.
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        handle_signals(handler, numbers)
        os.register_at_fork(after_in_child=_forget_signals)

    def wake(self) -> None:
        try:
            os.write(self._pipe[1], b"\0")
        except BlockingIOError:
            pass  # full: it is awake

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that came, after at most timeout_s."""
        poll = select.poll()
        poll.register(self._pipe[0], select.POLLIN)
        poll.poll(1000 * timeout_s)
        try:
            numbers = os.read(self._pipe[0], 4096)
        except BlockingIOError:
            return []
        return [number for number in numbers if number in SIGNALS]  # others are a program's own


class StopRequests:
    """Decide, from what one process is asked and how long its steps take, when it must leave.

    A thread listens. The main thread tells how long steps and checkpoints take.
    ends_process: whether to end it when leaving takes too long, or is asked for again; not a
    notebook's, whose variables would be lost.
    """

    def __init__(self, files: StopFiles | None = None) -> None:
        self.files = files
        self.first: StopRequest | None = None
        self.pipe = SignalPipe()
        self.is_over = False  # the process ends: signals ask for nothing more
        self.ends_process = True
        self.save_s = SAVE_GUESS_S
        self._num_own = 0  # signals to the main thread that are still to be heard here
        self._asked_s = 0.0
        self._drop_s = math.inf
        self._step_s = 0.0
        self._step_began_s: float | None = None
        sigterm_grant_s()  # an error in it now, and not when the signal comes

    def step_ended(self) -> None:
        """Take the time since the last call as what a step takes."""
        now = time.monotonic()
        # an attempt's first step comes with the parity gate and an evaluation
        if self._step_began_s is not None:
            self._step_s = now - self._step_began_s
        self._step_began_s = now

    def agreed_code(self) -> int:
        """Return the code to leave with after this step, -1 where nothing was asked."""
        return -1 if self.first is None or self.must_drop() else self.first.exit_code

    def must_drop(self) -> bool:
        """Say whether the step in flight is given up."""
        return time.monotonic() >= self._drop_s

    def listen(self, timeout_s: float = LISTEN_S) -> None:
        """Hear requests for at most timeout_s. A second one ends the process, if it may."""
        numbers = []
        for number in self.pipe.wait(timeout_s):
            if number == signal.SIGUSR1 and self._num_own:
                self._num_own -= 1
            else:
                numbers.append(number)
        asked = self.files.look() if self.files else None
        if self.is_over:
            return
        for request in [*map(signal_request, numbers), *([asked] if asked else [])]:
            self._ask(request)

    def interrupt(self) -> None:
        """Run the main thread's handler, by a signal that is no request.

        A real one, as that thread may wait in a system call.
        """
        self._num_own += 1
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)

    def _ask(self, request: StopRequest) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = request
            self._drop_s = self._latest(now, request.grant_s)
            if request.grant_s and now < self._drop_s:
                seconds = self._drop_s - now
                logger.warning(
                    "%s: the run ends after its step, within %.0f s", request.reason, seconds
                )
        elif not request.grant_s and now < self._drop_s:
            self._drop_s = now  # the step does not fit any more
        elif now - self._asked_s > AGAIN_S:
            if self.ends_process:
                logger.error("a second signal: ending at once, nothing more is saved")
                end_now(request.exit_code)
            # The main thread cannot leave before: the next train() would meet this one's save.
            logger.warning("%s: the run ends once it is saved", request.reason)
        else:
            return
        self._asked_s = now

    def _latest(self, now: float, grant_s: float) -> float:
        """Return when to give up the step in flight: now, where it would not be finished then."""
        # 2: another save may be under way, and the rescue's own comes behind it
        margin_s = min(FINISH_S + 2 * self.save_s, grant_s / 2)
        drop_s = now + grant_s - margin_s
        fits = self._step_began_s is None or self._step_began_s + self._step_s <= drop_s
        return drop_s if fits else now


class Unwinding(SystemExit):
    """Leave a run that is being built, as a signal asks."""


class BuildWatch:
    """Unwind soon when asked to while the run is built: there is nothing to save.

    ends_process: as StopRequests has it.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self.requests = StopRequests()
        self.requests.ends_process = ends_process
        self._unwinds = False
        self._is_lost = False  # its SystemExit
        self._over = threading.Event()
        self._hook_before = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable
        # Ctrl-C stays Python's own until training begins
        self.requests.pipe.open(self._on_signal, (signal.SIGTERM, signal.SIGUSR1))
        self._thread = threading.Thread(target=self._run, name="build-watch", daemon=True)
        self._thread.start()
        # One that came while the process imported, see cli.main, is heard here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def over(self) -> None:
        """Stop listening, before the rescue begins to or when all is closed."""
        if not self._over.is_set():
            self._over.set()
            self.requests.pipe.wake()
            self._thread.join(timeout=LISTEN_S)
            signal.set_wakeup_fd(-1)
            sys.unraisablehook = self._hook_before
            if self._is_lost and self.requests.first:
                raise Unwinding(self.requests.first.exit_code)

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Notice an exit that was raised in a weak reference's callback, which Python drops."""
        if isinstance(unraisable.exc_value, Unwinding):
            self._is_lost = True
        else:
            self._hook_before(unraisable)

    def _on_signal(self, number: int, frame: object) -> None:
        """Unwind through every finally: replicas are stopped, files closed."""
        if not self._unwinds or self._is_lost:
            self._unwinds = True
            self._is_lost = False
            raise Unwinding((self.requests.first or signal_request(number)).exit_code)

    def _run(self) -> None:
        # blocked since before the imports, and the main thread may block it again or hear nothing
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        requests = self.requests
        while not self._over.is_set() and requests.first is None:
            requests.listen()
        if requests.first is None:
            return

        request = requests.first
        if requests.files:
            requests.files.obeyed(reason=request.reason, exit_code=request.exit_code)
        requests.interrupt()

        # It may wait for ranks that never come, or for replicas that take long to stop.
        began = time.monotonic()
        while not self._over.is_set():
            requests.listen(0.1)
            if self._is_lost:
                requests.interrupt()
            is_late = time.monotonic() - began > LEAVE_S + CLOSE_S * self._unwinds
            if is_late and requests.ends_process:
                end_now(request.exit_code)


def handle_signals(
    handler: Callable[[int, object], None] | signal.Handlers, numbers: Sequence[int] = SIGNALS
) -> None:
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, handler)


def end_now(code: int) -> NoReturn:
    kill_children()
    os._exit(code)


def _forget_signals() -> None:
    """Let a forked child, such as a reward's, end by its own signals and not tell this process."""
    with suppress(ValueError):  # not of a main thread
        signal.set_wakeup_fd(-1)
        handle_signals(signal.SIG_DFL)


def _seconds(text: str) -> float | None:
    """Return a number of seconds, 0 or more; None where the text is none."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
