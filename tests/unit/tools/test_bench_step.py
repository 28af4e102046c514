"""The step benchmark's figures and errors, and a run of the tiny model."""

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import bench_step
import psutil
import pytest
import step_figures

from megadiff.config.load import load_config

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs/quickstart.yaml")
ROW = {
    "time/step_s": 4.0,
    "time/rollout_s": 1.5,
    "time/sample_s": 2.0,
    "time/train_s": 1.0,
    "optim/grad_norm": 1.0,
    "sync/gib": 0.5,
    "memory/peak_gib": 3.0,
    "policy/clip_fraction": 0.5,
    "reward/zero_std_ratio": 0.0,
}

HANGING = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(run_dir,) = [text.removeprefix("run.dir=") for text in sys.argv if text.startswith("run.dir=")]
folder = Path(run_dir) / "bench"
(folder / "logs").mkdir(parents=True)
(folder / "logs" / "replica_0.log").write_text("of a replica")
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper, start_new_session=True)
row = {"step": 1, "time/step_s": 2.0, "memory/train_gib": 5.0}
(folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
print("the last thing it said", flush=True)
ready = folder.parent.parent / "pids.part"
ready.write_text(f"{os.getpid()} {child.pid}")
ready.rename(folder.parent.parent / "pids")
time.sleep(600)
"""
BENCH = """
import sys, time
from argparse import Namespace
from pathlib import Path
sys.path.insert(0, {tools!r})
import bench_step
bench_step.STOP_S = 0.5
# No time passes before the trainer hangs.
clock = lambda: 1000.0 if Path({pids!r}).exists() else 0.0
bench_step.time = Namespace(sleep=time.sleep, monotonic=clock, perf_counter=clock)
bench_step._launcher = lambda options: [sys.executable, {trainer!r}]
bench_step._model = lambda config, options, scratch: (Path(config.model.path), {{}})
bench_step.planned_gib = lambda config, options: {{}}
sys.exit(bench_step.main(sys.argv[1:]))
"""


def test_figures_are_medians_and_rates(tiny_model):
    overrides = [
        "run.name=x",
        f"model.path={tiny_model}",
        "train.prompts_per_step=4",
        "algorithm.group_size=8",
    ]
    config = load_config([CONFIG, *overrides])
    slow = ROW | {
        "time/step_s": 9.0,
        "time/sample_s": 8.0,
        "memory/peak_gib": 5.0,
        "reward/zero_std_ratio": 0.75,
    }
    options = Namespace(gpus=2, rank_of=0, text_tokens=8, peak_tflops=0.5)
    found = step_figures.figures(
        [ROW, ROW, slow], config, model_folder=Path(tiny_model), options=options
    )
    assert (
        found["seconds"]["time/step_s"] == 4.0
        and found["samples_per_s"] == 8.0
        and found["peak_gib"] == 5.0
    )
    assert found["zero_std_ratio"] == 0.25  # a mean: a median would hide one step
    rollout, train = found["tflops_per_gpu"]["rollout"], found["tflops_per_gpu"]["train"]
    assert train / rollout == pytest.approx(
        (2 * 3 / 1.0) / (10 / 2.0)
    )  # 2 noise levels against 10 steps, forward and backward
    assert found["mfu"] == {"rollout": rollout / 0.5, "train": train / 0.5}


def test_sides_in_fp8_are_held_against_fp8s_peak():
    config = load_config([CONFIG, "run.name=x", "engine.fp8=rowwise"])
    rates = {"rollout": 380.0, "train": 602.0}
    share = step_figures._fp8_rates(rates, config, Namespace(peak_fp8_tflops=1204.0))
    assert share == {"mfu_fp8": {"train": 0.5}, "peak_fp8_tflops": 1204.0}
    config.engine.fp8 = "none"
    assert step_figures._fp8_rates(rates, config, Namespace(peak_fp8_tflops=1204.0)) == {}


def test_memory_of_each_phase_stands_beside_what_was_planned(tiny_model):
    config = load_config([CONFIG, "run.name=x", f"model.path={tiny_model}"])
    planned = bench_step.planned_gib(
        config, Namespace(gpu="h200", gpus=1, rank_of=0, text_tokens=8)
    )
    assert planned.keys() == {"log_probs", "rollout", "sync", "update"} and all(
        gib > 0 for gib in planned.values()
    )
    rows = [
        {"memory/parity_gib": 7.0, "memory/train_gib": 9.0},
        {"memory/train_gib": 4.0},
        {"memory/train_gib": 5.0},
    ]
    found = step_figures.memory_gib(rows, {"update": 4.0, "rollout": 1.0}, warmup=1)
    assert found == {"parity": {"measured": 7.0}, "train": {"measured": 5.0, "planned": 4.0}}
    beside = step_figures.memory_gib(rows, {}, warmup=1, held_gib=1.5)
    assert beside == {"parity": {"measured": 5.5}, "train": {"measured": 3.5}}
    seconds = {"time/step_s": 2.0}
    rates = {"tflops_per_gpu": {"train": 380.0}, "mfu": {"train": 0.5}, "peak_tflops": 761.0}
    sizes = {
        "samples": 8,
        "samples_per_s": 4.0,
        "peak_gib": 3.0,
        "start_s": 9.0,
        "zero_std_ratio": 0.0,
    }
    text = step_figures.table({"seconds": seconds, "memory_gib": found, **rates, **sizes})
    assert "| train | 5.0 | 4.0 | 1.25 |" in text and "| parity | 7.0 | – | – |" in text
    assert "MFU of 761): train 380 (50%)" in text and "equal rewards" not in text
    unequal = sizes | {"zero_std_ratio": 0.25}
    assert "25 % of the groups have equal rewards" in step_figures.table(
        {"seconds": seconds, "memory_gib": found, **rates, **unequal}
    )
    other_world = load_config([CONFIG, f"model.path={tiny_model}", "parallel.sp=7"])
    assert (
        bench_step.planned_gib(other_world, Namespace(gpu="h200", gpus=1, rank_of=0, text_tokens=8))
        == {}
    )


def test_a_run_that_cannot_start_is_shown(tiny_model, tmp_path, capsys):
    arguments = [
        CONFIG,
        "--scratch",
        str(tmp_path),
        f"model.path={tiny_model}",
        "run.device=cpu",
    ]
    assert bench_step.main([*arguments, "train.prompts_per_step=3", "parallel.sp=7"]) == 1
    assert "world_size=1 is not a multiple of sp*tp = 7*1 = 7" in capsys.readouterr().err
    assert bench_step.main([*arguments, "train.no_such_key=3"]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run(tiny_model, tmp_path, capsys):
    """With a real replica, stopped after its steps, nothing left behind."""
    out = tmp_path / "out.json"
    sizes = [
        "train.prompts_per_step=2",
        "algorithm.group_size=4",
        "rollout.num_replicas=1",
        "rollout.num_inference_steps=4",
    ]
    options = [
        "--steps=1",
        "--warmup=1",
        "--layers=1",
        "--text-layers=1",
        f"--scratch={tmp_path}",
        f"--out={out}",
    ]
    sizes += [
        "rollout.sde_window_range=[0,3]",
        f"model.path={tiny_model}",
        "run.device=cpu",
        "parity.mode=warn",
    ]
    assert bench_step.main([CONFIG, *options, *sizes]) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert "| step | " in printed and json.loads(printed.splitlines()[-1]) == report
    assert (
        report["samples"] == 8
        and report["seconds"]["time/step_s"] > 0
        and report["tflops_per_gpu"]["train"] > 0
    )
    assert (
        report["random_weights"]["parameters"] > 0 and "parity/log_prob_gap_max" in report["parity"]
    )
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--timeout-s", "SIGTERM"])
def test_a_run_that_does_not_end_is_stopped_and_shown(tmp_path, way):
    """A trainer that ignores SIGTERM, with a child in a session of its own, as torchrun's ranks and
    replicas are: after one step nothing more comes. None of them is left.
    """
    trainer = tmp_path / "trainer.py"
    trainer.write_text(HANGING)
    run, pids = tmp_path / "bench.py", tmp_path / "pids"
    run.write_text(BENCH.format(tools=str(ROOT / "tools"), trainer=str(trainer), pids=str(pids)))
    timeout = ["--timeout-s=2"] if way == "--timeout-s" else []
    command = [
        sys.executable,
        str(run),
        CONFIG,
        f"--scratch={tmp_path}",
        *timeout,
    ]
    bench = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    if way == "SIGTERM":
        deadline = time.monotonic() + 120
        while not pids.exists() and bench.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
    error = bench.communicate(timeout=120)[1]
    assert bench.returncode == (1 if timeout else 143), error
    assert ("not done after 2 s" if timeout else "stopped by SIGTERM") in error
    assert (
        "step 1: memory/train_gib 5" in error
        and "the last thing it said" in error
        and "of a replica" in error
    )
    assert not any(_runs(int(pid)) for pid in pids.read_text().split())
    assert not list(tmp_path.glob("bench_step_*"))


def _runs(pid: int) -> bool:
    """Whether the process still does something; what nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
