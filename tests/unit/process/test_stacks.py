"""`megadiff stacks` shows where a process hangs, and ends none."""

import json
import subprocess
import sys
import time

import pytest

from megadiff.cli.stacks import main
from megadiff.process.stacks import FOLDER, announcements

# PyDLL keeps the interpreter's lock: no Python of this process runs until the call is over.
HANGS = """
import ctypes, sys
from pathlib import Path
from megadiff.process.stacks import announce

def stuck_in_a_library():
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(60)

announce(Path(sys.argv[1]), "rank_0")
stuck_in_a_library()
"""


@pytest.fixture
def started():
    processes = []

    def start(code, *arguments):
        processes.append(subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


def wait_for_announcement(folder):
    deadline = time.monotonic() + 20
    while not list(folder.glob("[!.]*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads(next(folder.glob("[!.]*.json")).read_text())


def test_a_process_that_hangs_in_a_library_is_shown_and_lives_on(tmp_path, capsys, started):
    folder = tmp_path / FOLDER
    process = started(HANGS, folder)
    wait_for_announcement(folder)
    for _ in range(2):  # the second answer is not the first one's end
        assert main([str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"=== rank_0 (pid {process.pid})\n")
        assert shown.count("in stuck_in_a_library") == 1
    assert process.poll() is None


def test_no_process_gets_the_signal_that_did_not_ask_for_it(tmp_path, capsys, started):
    """Its pid may be another's by now: neither its start nor its handler is what was announced."""
    folder = tmp_path / FOLDER
    process = started(HANGS, folder)
    row = wait_for_announcement(folder)
    deaf = started("import time; time.sleep(60)")
    started_ticks = int(open(f"/proc/{deaf.pid}/stat").read().rpartition(")")[2].split()[19])

    file = next(folder.glob("[!.]*.json"))
    for changes in (
        {"started": row["started"] - 1},
        {"pid": deaf.pid, "started": started_ticks},
    ):
        file.write_text(json.dumps(row | changes))
        assert not announcements(folder)
        assert main([str(tmp_path)]) == 2
        assert "no process" in capsys.readouterr().err
    assert process.poll() is None and deaf.poll() is None


def test_a_process_that_is_stopped_is_said_to_be(tmp_path, capsys, started):
    folder = tmp_path / FOLDER
    process = started(HANGS, folder)
    wait_for_announcement(folder)
    process.send_signal(19)  # SIGSTOP
    assert main([str(tmp_path), "--wait-s", "0.3"]) == 1
    assert "no answer within 0.3 s; state T: it is stopped" in capsys.readouterr().out


def test_of_two_processes_of_one_name_the_stopped_one_is_told(tmp_path, capsys, started):
    """A replica that outlived its end, and the one that was started in its place."""
    folder = tmp_path / FOLDER
    old = started(HANGS, folder)
    wait_for_announcement(folder)
    old.send_signal(19)  # SIGSTOP
    new = started(HANGS, folder)
    while len(list(folder.glob("[!.]*.json"))) < 2:
        assert new.poll() is None
        time.sleep(0.02)
    assert main([str(tmp_path), "--wait-s", "1"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("in stuck_in_a_library") == 1
    assert f"=== rank_0 (pid {old.pid})\nno answer within 1 s; state T" in shown


@pytest.mark.parametrize("job, command", [("", "ssh node7"), ("42", "srun --jobid 42 --overlap")])
def test_other_hosts_are_named_with_a_command(tmp_path, capsys, job, command):
    (tmp_path / FOLDER).mkdir()
    row = {"name": "rank_8", "home": "node7/boot/pid:[1]", "pid": 1, "started": 5, "job": job}
    (tmp_path / FOLDER / "rank_8.1.json").write_text(json.dumps(row))
    main([str(tmp_path)])
    shown = capsys.readouterr().out
    assert "rank_8" in shown and command in shown and f"stacks {tmp_path}" in shown
