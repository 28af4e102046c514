"""What a replica process is given, and what is shown of one that died."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megadiff.rollout.client import processes
from megadiff.rollout.client.processes import (
    LOG_TAIL_LINES,
    TOKEN_VARIABLE,
    ReplicaProcess,
    ServerProcess,
    log_tail,
    replica_environment,
    serve_command,
    write_token,
)
from megadiff.rollout.client.registry import read_claims
from megadiff.rollout.spec import ReplicaSpec, read_spec
from tests.waiting import wait_for


def test_the_end_of_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_text("".join(f"line {place}\n" for place in range(1000)))
    assert log_tail(log).splitlines() == [
        f"  | line {place}" for place in range(1000 - LOG_TAIL_LINES, 1000)
    ]


def test_of_a_crash_what_came_before_it_and_who_crashed(tmp_path: Path) -> None:
    """Behind it follow all threads' stacks and the names of all extension modules."""
    log = tmp_path / "log"
    stacks = "".join(
        f'Thread {place} (most recent call first):\n  File "a.py", line 1 in f\n'
        for place in range(50)
    )
    modules = "Extension modules: " + ", ".join(f"package.module_{place}" for place in range(1000))
    crash = "Fatal Python error: Aborted\n\nCurrent thread 7 (most recent call first):\n"
    log.write_text(
        "loading\n" * 1000 + f"c10::Error: an illegal memory access\n{crash}{stacks}{modules}\n"
    )
    shown = log_tail(log)
    assert (
        "illegal memory access" in shown
        and "Current thread 7" in shown
        and "Extension modules" not in shown
    )
    assert len(shown.splitlines()) == 2 * LOG_TAIL_LINES


def test_a_second_death_is_told_by_the_log_of_the_second_life(tmp_path):
    program = f"""
import os
os.chdir({str(tmp_path)!r})
print("no memory" if os.path.exists("lived") else "Fatal Python error")
open("lived", "w")
"""
    command = [sys.executable, "-c", program]
    process = ServerProcess("a", command, log=tmp_path / "log", environment=dict(os.environ))
    process.process.wait()
    assert "Fatal Python error" in process.death()
    process.start()
    process.process.wait()
    assert "no memory" in process.death() and "Fatal" not in process.death()
    assert "Fatal Python error" in process.log.read_text()


def test_the_token_is_in_the_environment_and_on_no_command_line(tmp_path, monkeypatch):
    """Every user of the machine can read a command line, and nobody else's environment."""
    monkeypatch.setenv(TOKEN_VARIABLE, "the trainer's own")
    assert replica_environment(num_threads=1, token="drawn")[TOKEN_VARIABLE] == "drawn"
    assert replica_environment(num_threads=1)[TOKEN_VARIABLE] == "the trainer's own"
    report = "import os; print(os.environ['MEGADIFF_TOKEN'])"
    monkeypatch.setattr(processes, "serve_command", lambda _: [sys.executable, "-c", report])
    spec = ReplicaSpec(name="a", model=tmp_path, dtype="float32", registry=tmp_path)
    log = tmp_path / "a.log"
    (tmp_path / "a.json").write_text("an earlier start's, which others can read")
    process = ReplicaProcess(spec, log=log, num_threads=1, token="drawn")
    assert process.process.wait(30) == 0
    assert log.read_text() == "drawn\n"
    monkeypatch.undo()
    spec_file = tmp_path / "a.json"
    assert serve_command(spec_file)[-2:] == ["--spec", str(spec_file)]
    assert "drawn" not in " ".join(serve_command(spec_file)) + spec_file.read_text()
    assert stat.S_IMODE(spec_file.stat().st_mode) == 0o600
    assert read_spec(spec_file) == spec


def test_what_is_for_ranks_alone_does_not_reach_a_replica(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
        monkeypatch.setenv(name, "1")
        assert name not in replica_environment(num_threads=1)


def test_gpus_are_those_that_the_trainer_sees(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert replica_environment(num_threads=1, gpus=[0, 2])["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert "CUDA_VISIBLE_DEVICES" not in replica_environment(num_threads=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a")
    assert replica_environment(num_threads=1, gpus=[0, 2])["CUDA_VISIBLE_DEVICES"] == "4,GPU-a"


def test_only_the_user_can_read_the_token(tmp_path):
    registry = tmp_path / "run" / "replicas"
    before = os.umask(0)
    try:
        token = write_token(registry)
    finally:
        os.umask(before)
    path = registry / "token"
    assert path.read_text() == f"{token}\n" and len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_claims(registry) == ([], {})
    with pytest.raises(FileExistsError):
        write_token(registry)


def test_a_token_is_not_written_through_a_link(tmp_path):
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_token(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_replica_on_gpus_is_bound_beside_them_and_another_is_not(tmp_path, monkeypatch):
    bound = []
    monkeypatch.setattr(processes, "bind", lambda pid, gpus, *, name: bound.append((pid, gpus)))
    monkeypatch.setattr(processes, "serve_command", lambda _: [sys.executable, "-c", "pass"])
    for name, gpus in (("a", [2, 3]), ("b", [])):
        spec = ReplicaSpec(name=name, model=tmp_path, dtype="float32", registry=tmp_path)
        process = ReplicaProcess(spec, log=tmp_path / f"{name}.log", num_threads=1, gpus=gpus)
        assert process.process.wait(30) == 0
        if gpus:
            on_gpus = process.process.pid
    assert bound == [(on_gpus, [2, 3])]


def test_a_process_that_is_stopped_is_named_also_a_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    process = processes.ServerProcess("r", command, log=tmp_path / "r.log", environment=os.environ)
    try:
        leader = psutil.Process(process.process.pid)
        wait_for(leader.children)
        (worker,) = leader.children()
        assert process.stopped_pid() == 0
        for stopped in (worker, leader):
            stopped.suspend()
            wait_for(lambda: process.stopped_pid() == stopped.pid)  # noqa: B023
            stopped.resume()
            wait_for(lambda: not process.stopped_pid())
    finally:
        process.kill()
    assert process.stopped_pid() == 0 and process.ending()


def test_what_a_dead_one_left_is_killed_and_its_number_is_never_signalled_again(tmp_path) -> None:
    """Hours later the number may be that of a stranger's group."""
    left = tmp_path / "left"
    script = f"sleep 60 & echo $! > {left}"
    command = ["sh", "-c", script]
    process = processes.ServerProcess("r", command, log=tmp_path / "r.log", environment=os.environ)
    wait_for(process.ending)
    worker = int(left.read_text())

    def is_gone() -> bool:
        if not psutil.pid_exists(worker):
            return True
        return psutil.Process(worker).status() == psutil.STATUS_ZOMBIE

    wait_for(is_gone)

    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        process.process.pid = bystander.pid
        process.kill()
        process.stop()
        processes.stop_all([process])
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)
