"""The step benchmark's figures and errors, and a run of the tiny model."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import bench_step  # noqa: E402

from megadiff.config.load import load_config  # noqa: E402

ROW = {
    "time/step_s": 4.0, "time/rollout_s": 2.0, "time/train_s": 1.0,
    "optim/grad_norm": 1.0, "sync/gib": 0.5, "memory/peak_gib": 3.0,
}  # fmt: skip


def test_figures_are_medians_and_rates(tiny_model):
    overrides = ["run.name=x", f"model.path={tiny_model}", "train.prompts_per_step=4", "algorithm.group_size=8"]
    config = load_config([str(ROOT / "configs/quickstart.yaml"), *overrides])
    slow = ROW | {"time/step_s": 9.0, "time/rollout_s": 8.0, "memory/peak_gib": 5.0}
    options = Namespace(gpus=2, text_tokens=8)
    found = bench_step.figures([ROW, ROW, slow], config, model_folder=Path(tiny_model), options=options)
    assert found["seconds"]["time/step_s"] == 4.0 and found["samples_per_s"] == 8.0 and found["peak_gib"] == 5.0
    rollout, train = found["tflops_per_gpu"]["rollout"], found["tflops_per_gpu"]["train"]
    assert train / rollout == pytest.approx((2 * 3 / 1.0) / (10 / 2.0))  # 2 of 10 steps, forward and backward


def test_a_run_that_cannot_start_is_shown(tiny_model, tmp_path, capsys):
    arguments = [
        str(ROOT / "configs/quickstart.yaml"),
        "--scratch",
        str(tmp_path),
        f"model.path={tiny_model}",
        "run.device=cpu",
    ]
    assert bench_step.main([*arguments, "train.prompts_per_step=3", "parallel.sp=7"]) == 1
    assert "world_size=1 is not a multiple of sp*tp = 7*1 = 7" in capsys.readouterr().err
    assert bench_step.main([*arguments, "train.no_such_key=3"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_run(tiny_model, tmp_path, capsys):
    """With a real replica, stopped after its steps, nothing left behind."""
    out = tmp_path / "out.json"
    sizes = [
        "train.prompts_per_step=2",
        "algorithm.group_size=4",
        "rollout.num_replicas=1",
        "rollout.num_inference_steps=4",
    ]
    options = ["--steps=1", "--warmup=1", "--layers=1", "--text-layers=1", f"--scratch={tmp_path}", f"--out={out}"]
    sizes += ["rollout.sde_window_range=[0,3]", f"model.path={tiny_model}", "run.device=cpu", "parity.mode=warn"]
    assert bench_step.main([str(ROOT / "configs/quickstart.yaml"), *options, *sizes]) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert "| step | " in printed and json.loads(printed.splitlines()[-1]) == report
    assert report["samples"] == 8 and report["seconds"]["time/step_s"] > 0 and report["tflops_per_gpu"]["train"] > 0
    assert report["random_weights"]["parameters"] > 0 and "parity/log_prob_gap_max" in report["parity"]
    assert list(tmp_path.iterdir()) == [out]
