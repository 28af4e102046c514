"""What a process is asked, by signals and by the file, and when it must leave for it."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from megadiff.train import stop
from megadiff.train.stop import StopFiles, StopRequest, StopRequests, signal_request, stopped_code

ROOT = Path(__file__).parents[3]
USR1 = StopRequest(reason="SIGUSR1", exit_code=75, grant_s=240.0)
SIGTERM = StopRequest(reason="SIGTERM", exit_code=143)


class Ended(Exception):
    """Stands for the process's end."""


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(
        stop, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: time.time())
    )

    def end_now(code):
        raise Ended(code)

    monkeypatch.setattr(stop, "end_now", end_now)
    return clock


def requests_after(clock, *, step_s, elapsed_s, save_s):
    requests = StopRequests()
    requests.save_s = save_s
    for _ in range(2):
        clock.now += step_s
        requests.step_ended()
    clock.now += elapsed_s
    return requests


@pytest.mark.parametrize(
    ("step_s", "elapsed_s", "save_s", "grant_s", "wait_s"),
    [
        (60, 30, 20, 240, 240 - 10 - 40),  # 30 s more, of 190
        (60, 30, 20, 59, 0),  # half of it is the margin: 29.5 are left
        (60, 30, 20, 60, 30),
        (60, 300, 20, 240, 190),  # slower than the last: it may end at any time
        (60, 0, 500, 240, 120),  # at most half is for the checkpoint
        (1, 0, 20, 0, 0),
    ],
)
def test_a_step_is_finished_where_it_fits(clock, step_s, elapsed_s, save_s, grant_s, wait_s):
    requests = requests_after(clock, step_s=step_s, elapsed_s=elapsed_s, save_s=save_s)
    assert requests.agreed_code() == -1 and not requests.must_drop()
    requests._ask(StopRequest(reason="a test", exit_code=75, grant_s=grant_s))
    clock.now += max(0, wait_s - 0.01)
    assert requests.must_drop() == (wait_s == 0)
    assert requests.agreed_code() == (75 if wait_s else -1)
    clock.now += 0.02
    assert requests.must_drop()
    assert requests.agreed_code() == -1  # the rescue has it


def test_the_first_step_of_an_attempt_is_waited_for(clock):
    requests = StopRequests()
    clock.now += 500
    requests._ask(USR1)
    clock.now += 240 - 10 - 2 * stop.SAVE_GUESS_S - 0.01
    assert not requests.must_drop()


def test_a_request_without_time_hurries_one_with_it(clock):
    requests = requests_after(clock, step_s=10, elapsed_s=1, save_s=1)
    requests._ask(USR1)
    clock.now += 1
    assert not requests.must_drop()
    requests._ask(SIGTERM)
    assert requests.must_drop() and requests.first == USR1
    requests._ask(SIGTERM)  # torchrun repeats it
    clock.now += 2.1
    with pytest.raises(Ended, match="143"):
        requests._ask(SIGTERM)


def test_a_second_request_ends_the_process(clock):
    requests = requests_after(clock, step_s=10, elapsed_s=1, save_s=1)
    requests._ask(USR1)
    clock.now += 1.9
    requests._ask(USR1)
    clock.now += 0.2
    with pytest.raises(Ended, match="75"):
        requests._ask(USR1)


def test_a_second_request_leaves_a_notebook_alive(clock, caplog):
    requests = requests_after(clock, step_s=10, elapsed_s=1, save_s=1)
    requests.ends_process = False
    for _ in range(3):
        requests._ask(SIGTERM)
        clock.now += 2.1
    assert requests.must_drop() and requests.first == SIGTERM
    assert caplog.messages == ["SIGTERM: the run ends once it is saved"] * 2


@pytest.mark.parametrize(
    ("text", "grant_s"),
    [("90", 90), (" 7.5\n", 7.5), ("0", 0), ("soon", 240), ("nan", 240), ("-1", 240), ("é", 240)],
)
def test_the_file_says_how_many_seconds_are_left(tmp_path, text, grant_s):
    files = StopFiles(tmp_path)
    assert files.look() is None
    (tmp_path / "stop").write_text(text)
    request = files.look()
    assert request.grant_s == pytest.approx(grant_s, abs=1.0)
    assert request.exit_code == 75 and str(tmp_path / "stop") in request.reason
    assert files.look() is None
    _age(tmp_path / "stop", 30.0)  # another time of change is another request
    assert files.look().grant_s == pytest.approx(max(0, grant_s - 30), abs=1.0)


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_an_empty_file_may_be_half_written(tmp_path):
    files = StopFiles(tmp_path)
    (tmp_path / "stop").touch()
    assert files.look() is None
    _age(tmp_path / "stop", 0.6)
    assert files.look().grant_s == pytest.approx(239.4, abs=1.0)


def test_no_file_is_no_request(tmp_path):
    (tmp_path / "stop").mkdir()
    assert StopFiles(tmp_path).look() is None
    assert StopFiles(tmp_path / "nowhere").look() is None


def test_an_attempt_begins_without_what_earlier_ones_left(tmp_path):
    (tmp_path / "stopped").write_text("{}")
    (tmp_path / "stop").touch()
    files = StopFiles(tmp_path)
    files.begin()
    assert not (tmp_path / "stopped").exists()
    assert (tmp_path / "stop").exists()  # this process was asked while it imported
    _age(tmp_path / "stop", 1e6)
    files.begin()
    assert not (tmp_path / "stop").exists()


def test_a_stopped_run_says_where_it_stands(tmp_path):
    for step in (9, 10, 1_000_000):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (tmp_path / "stop").touch()
    files = StopFiles(tmp_path)
    files.obeyed(reason="SIGTERM", exit_code=143)
    assert not (tmp_path / "stopped").exists()
    files.obeyed(reason="SIGUSR1", exit_code=75)
    (line,) = (tmp_path / "stopped").read_text().splitlines()
    row = json.loads(line)
    assert (row["step"], row["reason"]) == (1_000_000, "SIGUSR1")
    assert row["attempt"].startswith("20")
    assert not (tmp_path / "stop").exists()
    # a run ends all the same
    StopFiles(tmp_path / "nowhere").obeyed(reason="SIGUSR1", exit_code=75)


@pytest.mark.parametrize(("count", "code"), [("0", 0), ("1", 0), ("2", 75)])
def test_torchrun_starts_no_stopped_run_again(monkeypatch, count, code):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert stopped_code() == code


def test_sigterm_grants_what_the_environment_says(monkeypatch):
    assert signal_request(signal.SIGTERM).grant_s == 0
    monkeypatch.setenv("MEGADIFF_STOP_GRACE_S", "90")
    assert signal_request(signal.SIGTERM) == StopRequest(
        reason="SIGTERM", exit_code=143, grant_s=90
    )
    assert signal_request(signal.SIGINT).grant_s == 0
    for text in ("soon", "-1", str(math.inf)):
        monkeypatch.setenv("MEGADIFF_STOP_GRACE_S", text)
        with pytest.raises(ValueError, match="MEGADIFF_STOP_GRACE_S='.*' is no number of seconds"):
            StopRequests()


def is_open(pipe: str) -> bool:
    """Say whether a descriptor of this process refers to it, by its name such as pipe:[123]."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread's, just closed
            if os.readlink(f"/proc/self/fd/{descriptor}") == pipe:
                return True
    return False


def test_a_pipe_is_closed_when_nobody_waits_on_it_any_more():
    """A notebook's kernel trains many times. A thread that waits must not meet a closed pipe."""
    requests = StopRequests()
    reader, writer = requests.pipe._pipe
    pipe = os.readlink(f"/proc/self/fd/{reader}")
    listener = threading.Thread(target=requests.listen, args=(60.0,), daemon=True)
    listener.start()
    del requests
    gc.collect()
    assert is_open(pipe)

    os.write(writer, b"\0")
    listener.join()
    gc.collect()
    assert not is_open(pipe)


PROGRAM = """
import ctypes, os, signal, sys, threading, time, weakref
from pathlib import Path
from megadiff.train import stop
case, folder = sys.argv[1], Path(sys.argv[2])
stop.LEAVE_S = 0.5
stop.CLOSE_S = 1.0
watch = stop.BuildWatch(ends_process="notebook" not in case)
files = stop.StopFiles(folder)
files.begin()
watch.requests.files = files
number = signal.SIGTERM if "term" in case else signal.SIGUSR1
try:
    if "deaf" in case:  # a collective that no other rank joins
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        ctypes.CDLL(None).sleep(3 if "notebook" in case else 20)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGTERM])
    elif "file" in case:
        (folder / "stop").write_text("60")
    elif "dropped" in case:  # Python drops what is raised in a weak reference's callback
        class Referred:
            pass
        referred = Referred()
        reference = weakref.ref(referred, lambda _: os.kill(os.getpid(), number))
        del referred
    else:
        os.kill(os.getpid(), number)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.1)
finally:
    if "slow" in case:
        time.sleep(4 if "notebook" in case else 20)
    print("closed", flush=True)
    watch.over()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code", "closes"),
    [
        ("usr1", 75, True),
        ("term", 143, True),
        ("file", 75, True),
        ("usr1_dropped", 75, True),
        ("term_dropped", 143, True),
        ("slow usr1", 75, False),
        ("deaf usr1", 75, False),
        ("slow usr1 notebook", 75, True),
        ("deaf usr1 notebook", 75, True),
    ],
)
def test_a_run_that_is_built_ends_soon(tmp_path, case, code, closes):
    command = [sys.executable, "-c", PROGRAM, case, str(tmp_path)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert ("closed" in done.stdout) == closes
    assert time.monotonic() - began < 18
    assert (tmp_path / "stopped").exists() == (code == 75)
    assert "Traceback" not in done.stderr
