"""A traced step: the same bits as without a trace, and a table that adds up to its seconds."""

import gzip
import json
import logging

import pytest
import torch

from megadiff.observe.profile import StepProfile
from megadiff.observe.profile_table import summarise, to_markdown
from megadiff.observe.timers import Timers


def event(name: str, begin: float, end: float, *, cat: str = "user_annotation", tid: int = 1):
    """begin, end: in seconds."""
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, **times}


RANGES = [
    event("stage/step", 10, 20),
    event("stage/sample", 10, 14),
    event("stage/rollout", 10, 13.5),
    event("stage/train", 14, 19.8),
    event("stage/rollout", 30, 40),  # of no step
    event("Optimizer.step#AdamW.step", 18, 19),
    {"ph": "i", "name": "a mark", "ts": 1.0},
]
OPERATORS = [
    event("aten::linear", 14, 17, cat="cpu_op"),
    event("aten::addmm", 15, 16.5, cat="cpu_op"),
    event("aten::mul", 16.9, 17.5, cat="cpu_op", tid=2),  # backward's thread
]


def test_stages_add_up_to_the_step():
    summary = summarise(RANGES + OPERATORS)
    rows = {stage.name: stage for stage in summary.stages}
    assert summary.step_s == 10 and not summary.on_gpu
    seconds = {name: pytest.approx(row.seconds) for name, row in rows.items()}
    assert seconds == {"train": 5.8, "rollout": 3.5, "sample": 0.5, "step": 0.2}
    assert summary.explained == pytest.approx(0.98)
    assert sum(row.seconds for row in summary.stages) == pytest.approx(summary.step_s)
    # 14 … 17.5 without a break, on two threads; then nothing until the stage's end
    assert rows["train"].busy_s == pytest.approx(3.5)
    assert rows["train"].stall_s == pytest.approx(2.3)
    assert rows["rollout"].busy_s == 0 and rows["rollout"].stall_s == pytest.approx(3.5)


def test_an_operators_own_time_is_without_what_it_calls():
    work = {row.name: row.seconds for row in summarise(RANGES + OPERATORS).work}
    assert work == pytest.approx({"aten::linear": 1.5, "aten::addmm": 1.5, "aten::mul": 0.6})


def test_on_a_gpu_kernels_count_and_operators_do_not():
    kernels = [
        event("gemm", 14, 15, cat="kernel", tid=7),
        event("gemm", 14.5, 16, cat="kernel", tid=8),  # at once, on another stream
        event("Memcpy HtoD", 16, 16.25, cat="gpu_memcpy", tid=7),
        event("stage/train", 14, 16.25, cat="gpu_user_annotation", tid=7),
    ]
    summary = summarise(RANGES + OPERATORS + kernels)
    assert summary.on_gpu
    assert {stage.name: stage.busy_s for stage in summary.stages}["train"] == pytest.approx(2.25)
    assert [(row.name, row.count) for row in summary.work] == [("gemm", 2), ("Memcpy HtoD", 1)]
    page = to_markdown(summary, title="step_000003")
    assert "| train | 5.800 | 58.0% | 3.550 | 3550.0 |" in page
    assert "| `gemm` | 2 | 2.5000 | 90.9% |" in page


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match=r"no range stage/step; trace with observe\.profile_steps"):
        summarise(OPERATORS)
    assert summarise(RANGES).work == []


def step(timers: Timers) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(64, 64))
    with timers("step"):
        with timers("rollout"):
            noise = torch.randn(64, 64)
        with timers("train"):
            (weight @ noise).square().mean().backward()
    return weight.grad


def test_only_the_chosen_step_is_traced_and_no_bit_differs(tmp_path, caplog):
    timers = Timers()
    profile = StepProfile(tmp_path, [2], timers=timers, rank=0, device_type="cpu")
    gradients = []
    for number in (1, 2, 3):
        torch.manual_seed(0)
        with caplog.at_level(logging.INFO), profile(number):
            gradients.append(step(timers))
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    assert timers.mark is None

    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == "step_000002"
    with gzip.open(folder / "rank_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    summary = summarise(events)
    assert {stage.name for stage in summary.stages} == {"step", "rollout", "train"}
    assert "aten::mm" in {row.name for row in summary.work}
    page = (folder / "summary.md").read_text()
    assert "| train |" in page and "`aten::mm`" in page
    assert "explains" in caplog.text


def test_other_ranks_write_their_trace_beside_it(tmp_path):
    timers = Timers()
    with StepProfile(tmp_path, [1], timers=timers, rank=3, device_type="cpu")(1):
        step(timers)
    files = [path.name for path in (tmp_path / "profile/step_000001").iterdir()]
    assert files == ["rank_3.json.gz"]


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file, where a folder should be")
    timers = Timers()
    with StepProfile(tmp_path, [1], timers=timers, rank=0, device_type="cpu")(1):
        step(timers)
    assert "not written" in caplog.text
