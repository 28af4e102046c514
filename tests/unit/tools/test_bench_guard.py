"""The guard's plain loop, its ratios and its verdicts."""

import json
from pathlib import Path

import bench_guard
import pytest

from megadiff.config.load import load_config
from megadiff.models.registry import build_adapter

ROOT = Path(__file__).parents[3]
NOISE_LEVELS = 2
CONFIG = str(ROOT / "configs/quickstart.yaml")


@pytest.fixture
def overrides(tiny_model):
    return [f"model.path={tiny_model}", "run.device=cpu", "rollout.true_cfg_scale=4"]


def test_the_plain_loop_counts_a_steps_passes(overrides, monkeypatch):
    """A pass is one second long here, so that seconds count passes."""
    monkeypatch.setattr(bench_guard, "seconds_a_call", lambda call, calls, device: call() or 1.0)
    config = load_config([CONFIG, *overrides, f"algorithm.noise_levels={NOISE_LEVELS}"])
    options = bench_guard._parser().parse_args(["--layers=1"])
    found = bench_guard.plain_seconds(config, options, device="cpu")
    samples = config.train.prompts_per_step * config.algorithm.group_size
    # with guidance a velocity is two forwards, but it is one call
    assert found == {
        "rollout": samples * config.rollout.num_inference_steps / config.rollout.batch_size,
        "train": samples * NOISE_LEVELS / config.train.microbatch_size,
    }


def test_the_plain_transformer_is_diffusers_own_and_has_gradients(overrides):
    config = load_config([CONFIG, *overrides])
    adapter = build_adapter(Path(config.model.path), "")
    transformer = bench_guard.plain_transformer(config, adapter, num_layers=1, device="cpu")
    assert type(transformer) is adapter.module_class()
    assert len(transformer.transformer_blocks) == 1
    call = bench_guard.one_velocity(
        transformer, adapter, bench_guard.sampling_of(config.rollout), num_rows=2, num_tokens=5
    )
    call().square().mean().backward()
    first = next(transformer.parameters())
    assert first.grad is not None and first.grad.abs().max() > 0


def test_verdicts(overrides, monkeypatch, tmp_path, capsys):
    seconds = {"time/sample_s": 6.0, "time/train_s": 4.0}
    monkeypatch.setattr(bench_guard, "step_seconds", lambda *args, **kwargs: seconds)
    plain = {"rollout": 5.0, "train": 4.0}
    monkeypatch.setattr(bench_guard, "plain_seconds", lambda *args, **kwargs: plain)
    monkeypatch.setattr(bench_guard, "STORE", tmp_path / "guard.json")
    command = [CONFIG, "--layers=1", *overrides]

    assert bench_guard.main(command) == 2
    assert "store it with --update" in capsys.readouterr().err

    assert bench_guard.main([*command, "--update"]) == 0
    (key,) = json.loads((tmp_path / "guard.json").read_text())
    assert "quickstart.yaml · 1 blocks" in key and "model.path" not in key

    assert bench_guard.main(command) == 0
    assert "| rollout | 6.000 | 5.000 | 1.200 | 1.200 |" in capsys.readouterr().out

    seconds["time/train_s"] = 4.4
    assert bench_guard.main(command) == 1
    error = capsys.readouterr().err
    assert "train takes 1.100 of the plain loop's time, stored is 1.000: +10.0%" in error
    assert "rollout" not in error

    monkeypatch.setattr(bench_guard, "step_seconds", lambda *args, **kwargs: None)
    assert bench_guard.main(command) == 1
    assert bench_guard.main([CONFIG, "train.no_such_key=3"]) == 2
