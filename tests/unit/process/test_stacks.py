"""`megadiff stacks` shows where a process hangs, and ends none."""

import json
import os
import subprocess
import sys
import time

import pytest

from megadiff.cli.stacks import main
from megadiff.process.stacks import FOLDER, announcements, drop_leftovers

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


def leave(folder, name, *, home="node7/boot/pid:[1]", pid=1, age_s=0.0):
    """Write what a process of another host, or of an earlier boot, has left."""
    row = {"name": name, "home": home, "pid": pid, "started": 5, "job": ""}
    folder.mkdir(exist_ok=True)
    for path, text in (
        (folder / f"{name}.{pid}.json", json.dumps(row)),
        (folder / f"{name}.{pid}.txt", ""),
    ):
        path.write_text(text)
        os.utime(path, (time.time() - age_s,) * 2)


def test_what_earlier_attempts_left_on_other_hosts_is_removed(tmp_path, started):
    """A requeue goes to other nodes, and pyxis gives each attempt a pid namespace of its own."""
    folder = tmp_path / FOLDER
    process = started(HANGS, folder)
    alive = wait_for_announcement(folder)
    for path in folder.glob("rank_0.*"):  # it was there before this attempt, and hangs
        os.utime(path, (time.time() - 7200,) * 2)
    for name in ("rank_0", "rank_479", "replica_3", "replica_3_worker_1"):
        leave(folder, name, age_s=3600)
    leave(folder, "node9-8000", age_s=3600)  # a separate replica, which serves the next run
    leave(folder, "rank_480", age_s=5)  # a rank of this attempt, on a node with a late clock

    drop_leftovers(folder, began_s=time.time())
    left = sorted(path.name for path in folder.glob("[!.]*.json"))
    assert left == ["node9-8000.1.json", f"rank_0.{process.pid}.json", "rank_480.1.json"]
    assert len(list(folder.glob("*.txt"))) == 3
    assert alive["pid"] == process.pid and process.poll() is None
    drop_leftovers(tmp_path / "none", began_s=time.time())


TRAIN = """
import sys
from megadiff.cli import train
from megadiff.config.schema import Config
from megadiff.parallel.mesh import Layout

layout = Layout(world_size=1, dp=1, dp_replicate=1, sp=1, tp=1)
train.check = lambda *_, **__: (layout, None, None, None)
train.check_engine_installed = lambda _: None
config = Config()
config.run.dir, config.run.name = sys.argv[1:]
config.run.device = "none"
try:
    train.train_rank(config, world_size=1)
except ValueError as error:
    print(error)
"""


def test_rank_0_removes_what_was_left_as_it_starts(tmp_path):
    folder = tmp_path / "run" / FOLDER
    folder.parent.mkdir()
    leave(folder, "rank_5", age_s=3600)
    command = [sys.executable, "-c", TRAIN, str(tmp_path), "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "run.device='none'" in done.stdout, done.stderr
    (left,) = folder.glob("[!.]*.json")
    assert left.name.startswith("rank_0.")
