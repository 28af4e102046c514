"""Whatever ends a run early, its finished steps are on disk, and the run goes on as if nothing had
been.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from megadiff.checkpoint.run_folders import whole_looking
from megadiff.cli.stacks import main as stacks
from megadiff.cli.train import main
from megadiff.rollout.limits import RUN_HEADER
from tests.distributed.ranks import Command
from tests.e2e.servers import ENVIRONMENT
from tests.extra import cases

FAULT = "reward.fault.type=tests.e2e.failing_step:FailingStep"
NO_FAULT = "reward.fault.args.step=1000"
# what clock and machine decide, and which replicas live
MACHINE = ("time/", "perf/", "memory/", "rollout/replicas")


@pytest.fixture(scope="module")
def shared(registry):
    return ["rollout.mode=separate", f"rollout.registry={registry}", "checkpoint.every=0"]


def rows_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if not key.startswith(MACHINE)} for row in rows]


def saved_steps(folder: Path) -> list[str]:
    return [path.name for path in whole_looking(folder / "checkpoints")]


@pytest.fixture(scope="module")
def whole_run(shared, tmp_path_factory, tiny_model):
    """Rows of six steps that nothing interrupts."""
    from tests.e2e.conftest import Trainer

    trainer = Trainer(tmp_path_factory.mktemp("whole"), tiny_model)
    result = trainer.run(*shared, FAULT, NO_FAULT, "train.num_steps=6")
    assert result.code == 0, result.stderr
    return rows_of(result.folder)


@pytest.mark.parametrize("kind", ["nan", "out_of_memory", "library_error"])
def test_an_error_in_an_update_loses_no_step(trainer, shared, whole_run, kind):
    """Three steps are finished when the fourth fails; resumed, the run is the uninterrupted one."""
    steps = ["train.num_steps=6", FAULT]
    failed = trainer.run(*shared, *steps, f"reward.fault.args.kind={kind}")
    assert failed.code == 1
    assert saved_steps(failed.folder) == ["step_000003"]
    assert "saved " in failed.stderr and "the same command continues from there" in failed.stderr
    assert "nothing was saved" not in failed.stderr
    if kind == "nan":
        assert "step 4: gradient norm is nan; the weights were left as they were" in failed.stderr
        assert "Largest rewards: 'fault' of prompt 'a " in failed.stderr
        assert "optim.skip_nonfinite=0" in failed.stderr
    if kind == "out_of_memory":
        assert "lower train.microbatch_size" in failed.stderr
    again = trainer.run(*shared, *steps, NO_FAULT)
    assert again.code == 0, again.stderr
    assert rows_of(again.folder) == whole_run


def test_half_a_step_is_saved_and_said(trainer, shared):
    """The second of two updates fails: weights are whole, but beyond step 3."""
    result = trainer.run(*shared, FAULT, "reward.fault.args.update=1", "train.num_steps=6")
    assert result.code == 1
    assert saved_steps(result.folder) == ["step_000003"]
    assert "(with 1 update of step 4, which is repeated)" in result.stderr


def test_some_batches_may_be_stepped_over(trainer, shared):
    skip = "optim.skip_nonfinite=1"
    result = trainer.run(*shared, FAULT, skip, "reward.fault.args.step=2", "train.num_steps=4")
    assert result.code == 0, result.stderr
    assert "Stepped over, 1 of optim.skip_nonfinite=1" in result.stderr
    assert [row["optim/skipped_batches"] for row in result.rows] == [0.0, 1.0, 1.0, 1.0]


def wait_until(condition: Callable[[], bool], running: Running, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert running.process.poll() is None, running.log.read_text()
        assert time.monotonic() < deadline, running.log.read_text()
        time.sleep(0.05)


class Running:
    """A trainer in the background, in a process group of its own as a shell starts it."""

    def __init__(self, command: list[str], folder: Path, *, num_processes: int) -> None:
        self.folder = folder / "run"
        self.log = folder / "stderr.txt"
        if num_processes == 1:
            self.process: subprocess.Popen | Command = forked_trainer(command, folder, self.log)
            return
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
            )

    def wait_for_rows(self, count: int, timeout_s: float = 200.0) -> None:
        path = self.folder / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, self, timeout_s)

    def family(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


def forked_trainer(command: list[str], folder: Path, log: Path) -> Command:
    """Start what Trainer.command() says, which writes to this log, in its own process group."""
    return Command(
        main,
        command[command.index("megadiff.cli.train") + 1 :],
        folder=folder,
        environment=ENVIRONMENT,
        prepare=os.setsid,
        out=Path(os.devnull),
        err=log,
    )


def give_replicas_back(registry: Path) -> None:
    """Spare the next test the minute after which the replicas of a killed run are free."""
    for file in registry.glob("*.json"):
        url = json.loads(file.read_text())["url"]
        owner = httpx.get(f"{url}/health", timeout=10).json()["run"]
        if owner:
            httpx.post(f"{url}/rl/release", headers={RUN_HEADER: owner}, timeout=10)


@pytest.fixture
def start(trainer, registry):
    started = []

    def start_one(*overrides: str, num_processes: int = 1, max_restarts: int = 0) -> Running:
        command = trainer.command(*overrides, num_processes=num_processes)
        if max_restarts:
            command.insert(command.index("--standalone"), f"--max-restarts={max_restarts}")
        started.append(Running(command, trainer.folder, num_processes=num_processes))
        return started[-1]

    yield start_one
    for running in started:
        try:
            os.killpg(running.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        running.process.wait(30)
        give_replicas_back(registry)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_so_in_one_line(trainer, shared, start, number, code):
    running = start(*shared, "train.num_steps=1000")
    running.wait_for_rows(2)
    running.process.send_signal(number)
    assert running.process.wait(60) == code
    stderr = running.log.read_text()
    (line,) = [line for line in stderr.splitlines() if "the same command continues" in line]
    assert number.name in line
    assert "Traceback" not in stderr
    rows = rows_of(running.folder)
    assert saved_steps(running.folder) == [f"step_{len(rows):06d}"]
    again = trainer.run(*shared, f"train.num_steps={len(rows) + 1}")
    assert again.code == 0, again.stderr
    assert [row["step"] for row in again.rows] == list(range(1, len(rows) + 2))


def test_a_second_signal_ends_at_once(shared, start):
    slow = [
        FAULT,
        "reward.fault.args.step=3",
        "reward.fault.args.kind=none",
        "reward.fault.args.slow_save_s=600",
    ]
    running = start(*shared, *slow, "train.num_steps=1000", "reward.fault.args.update=1000")
    running.wait_for_rows(3)
    running.process.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert running.process.poll() is None  # it saves
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(10) == 143
    assert not saved_steps(running.folder)


def test_one_ranks_error_saves_every_ranks_part(trainer, shared, start):
    """Rank 1 runs out of memory in the middle of an update, rank 0 waits for it in a collective."""
    fault = [
        FAULT,
        "reward.fault.args.rank=1",
        "reward.fault.args.kind=out_of_memory",
        "reward.fault.args.groups_per_step=2",
    ]
    running = start(*shared, *fault, "train.num_steps=6", "parallel.dp=2", num_processes=2)
    family = running.family()
    running.wait_for_rows(3)
    family = running.family()
    assert running.process.wait(100) == 1
    stderr = running.log.read_text()
    assert "error: rank 1: CUDA out of memory" in stderr
    assert saved_steps(running.folder) == ["step_000003"], stderr
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    again = trainer.run(*shared, FAULT, NO_FAULT, "train.num_steps=4")  # under another layout
    assert again.code == 0, again.stderr
    assert [row["step"] for row in again.rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "number", cases((signal.SIGKILL, signal.SIGINT), extra_ones=(signal.SIGINT,))
)
def test_ranks_end_with_torchrun_and_save(shared, start, number):
    running = start(*shared, "train.num_steps=1000", "parallel.dp=2", num_processes=2)
    running.wait_for_rows(2)
    family = running.family()
    if number == signal.SIGINT:
        os.killpg(running.process.pid, number)  # as a terminal does
    else:
        running.process.send_signal(number)
    running.process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, running.log.read_text()
    stderr = running.log.read_text()
    assert "the same command continues from there" in stderr, stderr
    rows = rows_of(running.folder)
    assert saved_steps(running.folder) == [f"step_{len(rows):06d}"]


def test_torchrun_starts_ranks_again_and_a_stop_ends_them(in_ranks, start, capsys):
    """Rank 0 is killed: the restarted ranks go on from the last checkpoint, with new replicas.

    Then a launcher asks by the file. torchrun must not start the ranks a third time. Meanwhile
    somebody looks at all that can be looked at, which changes no bit.
    """
    two_ranks = ["parallel.dp=2", "checkpoint.every=2"]
    traced = "observe.profile_steps=[2]"
    running = start(*two_ranks, traced, "train.num_steps=1000", num_processes=2, max_restarts=3)
    running.wait_for_rows(3)
    check_profile(running.folder / "profile/step_000002")
    first_family = running.family()
    victim = next(rank for rank in first_family if rank.environ().get("RANK") == "0")
    victim.kill()
    victim.wait(10)
    num_rows = (running.folder / "metrics.jsonl").read_text().count("\n")

    # the rows are cut back to the checkpoint's when the next attempt begins
    wait_until(lambda: "resumed from" in running.log.read_text(), running)
    _, alive = psutil.wait_procs(first_family[1:], timeout=60)
    assert not alive
    resumed = int(re.findall(r"resumed from .*\(step (\d+)\)", running.log.read_text())[-1])
    assert resumed >= 2
    assert num_rows - resumed <= 2 + 1  # checkpoint.every, and one step while it was written
    # More than the first attempt wrote: it says that it resumed before it drops that one's rows.
    running.wait_for_rows(num_rows + 1)
    family = running.family()
    check_stacks(running.folder, capsys)
    check_figures(running.folder)
    (running.folder / "stop").write_text("120\n")

    assert running.process.wait(100) == 0, running.log.read_text()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    mark = json.loads((running.folder / "stopped").read_text())
    rows = rows_of(running.folder)
    assert mark["step"] == len(rows) == rows[-1]["step"]
    assert saved_steps(running.folder)[-1] == f"step_{len(rows):06d}"
    assert not (running.folder / "stop").exists()
    stderr = running.log.read_text()
    assert stderr.count("resumed from") == 1

    whole = in_ranks("whole", 2, *two_ranks, f"train.num_steps={len(rows)}")
    assert rows == rows_of(whole.folder)


def check_profile(folder: Path) -> None:
    traces = {}
    for path in folder.glob("*.json.gz"):
        with gzip.open(path, "rt") as file:
            traces[path.name.removesuffix(".json.gz")] = json.load(file)["traceEvents"]
    assert traces.keys() == {"rank_0", "rank_1", "replica_0"}
    for name, events in traces.items():
        # it multiplies, each in its own process
        assert any(event["name"] == "aten::addmm" for event in events), name
    text = (folder / "summary.md").read_text()
    stages = re.findall(r"^\| (\w+) \| [0-9.]+ \|", text, re.MULTILINE)
    assert {"rollout", "train", "sample", "sync", "measure", "reward", "room"} <= set(stages)
    assert "`aten::" in text
    # A step is half a second here: cores that are lent elsewhere for 50 ms are a tenth of it. The
    # smallest of train, rollout and sync is 12 %; on a GPU 99 to 100 % are named.
    share = re.search(r"of which ([0-9.]+)% is in a named stage", text)
    assert share and float(share[1]) >= 85


def check_stacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Live processes of this attempt alone, where they are in our code; none ends of it."""
    assert stacks([str(folder)]) == 0
    shown = capsys.readouterr().out
    names = re.findall(r"^=== (\w+) \(pid", shown, re.MULTILINE)
    assert {"rank_0", "rank_1", "replica_0"} <= set(names) and len(names) == len(set(names))
    parts = dict(zip(names, re.split(r"^=== .*\n", shown, flags=re.MULTILINE)[1:], strict=True))
    assert "train/loop.py" in parts["rank_0"] and "server/server.py" in parts["replica_0"]


def check_figures(folder: Path) -> None:
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= row["perf/replica_idle_share"] < 1 and row["perf/replica_queue_s"] >= 0
    assert row["perf/device_s_per_sample"] == pytest.approx(2 / row["perf/samples_per_s"])
    text = (folder / "metrics.prom").read_text()
    assert 'megadiff_run_perf_replica_idle_share{run="run"} ' in text


def test_a_stop_under_torchrun_without_restarts(shared, start):
    """Its code is masked: `stopped` tells the launcher."""
    running = start(*shared, "train.num_steps=1000", "parallel.dp=2", num_processes=2)
    running.wait_for_rows(1)
    family = running.family()
    (running.folder / "stop").touch()
    assert running.process.wait(60) == 1
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    rows = rows_of(running.folder)
    mark = json.loads((running.folder / "stopped").read_text())
    assert mark["step"] == len(rows)
    assert "exitcode  : 75" in running.log.read_text()
    assert saved_steps(running.folder) == [f"step_{len(rows):06d}"]
