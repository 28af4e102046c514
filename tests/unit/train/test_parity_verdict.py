"""What the gate lets pass, and whose old log_probs a run takes."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megadiff.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, RolloutConfig
from megadiff.train.parity import LOG_PROB_GAP, recomputes, verdict

KEYS = (
    "parity/schedule_gap_max",
    "parity/embedding_gap_max",
    "parity/latents_gap_max",
    LOG_PROB_GAP,
)


def config(
    old_log_prob: str,
    *,
    clip_range: float = 1e-5,
    model: str = "float32",
    engine: str = "float32",
    fp8: bool = False,
    trainer_fp8: str = "none",
    guidance: float = 1.0,
    name: str = "flow_grpo",
):
    return SimpleNamespace(
        algorithm=AlgorithmConfig(name=name, old_log_prob=old_log_prob, clip_range=clip_range),
        model=ModelConfig(dtype=model),
        engine=EngineConfig(dtype=engine, fp8=trainer_fp8),
        rollout=RolloutConfig(fp8=fp8, true_cfg_scale=guidance),
    )


def gaps(**changed: float) -> dict[str, float]:
    return dict.fromkeys(KEYS, 0.0) | {
        f"parity/{name}_gap_max": value for name, value in changed.items()
    }


@pytest.mark.parametrize(
    "old_log_prob, gap, settings, words",
    [
        ("rollout", 4e-6, {}, ""),
        ("rollout", 6e-6, {}, "= 6e-06 >= 5e-06 (half of algorithm.clip_range"),
        ("auto", 6e-6, {}, ""),
        ("recompute", 6e-6, {}, ""),
        ("auto", 2e-5, {}, "= 2e-05 >= 1e-05 (more than float32 rounds"),
        ("auto", 2e-5, {"clip_range": 3e-5}, "= 2e-05 >= 1.5e-05 (more than float32 rounds"),
        ("auto", 2e-5, {"clip_range": 1.0}, ""),  # the rollout's own are good enough
        ("auto", 2e-5, {"guidance": 4.0}, ""),
        ("auto", 2e-4, {"guidance": 4.0}, "= 0.0002 >= 0.0001 (more than float32 rounds"),
        ("auto", 2e-5, {"model": "bfloat16", "engine": "bfloat16"}, ""),
        ("auto", 2e-5, {"engine": "bfloat16"}, ""),
        ("auto", 2e-3, {"model": "bfloat16"}, "= 0.002 >= 0.001 (more than bfloat16 rounds"),
        ("auto", 2e-3, {"model": "bfloat16", "fp8": True}, ""),
        ("auto", 6e-2, {"model": "bfloat16", "fp8": True}, "= 0.06 >= 0.05 (more than fp8 rounds"),
        ("auto", 2e-3, {"engine": "bfloat16", "trainer_fp8": "tensorwise"}, ""),
        ("rollout", 6e-6, {"model": "bfloat16", "fp8": True}, "half of algorithm.clip_range"),
        ("auto", float("inf"), {"model": "bfloat16"}, "= inf >="),
        # their losses have no ratio to the rollout's log_probs: neither is too strict, nor too lax
        ("rollout", 6e-6, {"name": "grpo_guard", "clip_range": 2e-6}, ""),
        ("rollout", 5e-4, {"name": "nft", "model": "bfloat16"}, ""),
        ("rollout", 2e-5, {"name": "awm", "clip_range": 1.0}, "(more than float32 rounds"),
    ],
)
def test_how_far_log_probs_may_be_apart(old_log_prob, gap, settings, words):
    found = verdict(gaps(log_prob=gap), config(old_log_prob, **settings))
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize("old_log_prob", ["rollout", "recompute", "auto"])
@pytest.mark.parametrize("name, gap", [("schedule", 1e-5), ("embedding", 1e-3), ("latents", 1.0)])
def test_other_gaps_are_never_let_pass(old_log_prob, name, gap):
    assert f"parity/{name}_gap_max" in verdict(
        gaps(**{name: gap}), config(old_log_prob, clip_range=1.0)
    )


def test_latents_may_be_apart_by_the_rounding_of_either_side():
    for trainer in ({"engine": "bfloat16"}, {"engine": "bfloat16", "trainer_fp8": "rowwise"}):
        assert verdict(gaps(latents=0.2), config("auto", **trainer)) == ""
    assert "latents_gap_max = 0.2 >= 0.01" in verdict(gaps(latents=0.2), config("auto"))


def test_auto_takes_the_rollouts_own_below_half_the_clip_range(caplog):
    caplog.set_level(logging.INFO)
    for gap, anew, level in (
        (4.9e-6, False, "INFO"),
        (5e-6, True, "WARNING"),
        (float("inf"), True, "WARNING"),
    ):
        caplog.clear()
        assert recomputes(gaps(log_prob=gap), config("auto").algorithm, before=False) == anew
        assert [record.levelname for record in caplog.records] == [level]
        assert f"{gap:.2e}" in caplog.text and "5.00e-06" in caplog.text
    # a resumed run goes on as it began
    assert recomputes(gaps(log_prob=0.0), config("auto").algorithm, before=True)


def test_the_narrower_side_of_the_clip_range_counts():
    narrow = replace(config("auto").algorithm, clip_range_high=1e-6)
    assert recomputes(gaps(log_prob=6e-7), narrow, before=False)
    assert not recomputes(gaps(log_prob=4e-7), narrow, before=False)
    wide = replace(config("auto").algorithm, clip_range_high=1e-4)
    assert not recomputes(gaps(log_prob=4.9e-6), wide, before=False)


@pytest.mark.parametrize("name", ["grpo_guard", "flow_dppo"])
@pytest.mark.parametrize("before", [False, True])
def test_auto_weighs_samples_where_the_clip_range_is_of_another_ratio(name, before, caplog):
    caplog.set_level(logging.INFO)
    settings = config("auto", name=name, clip_range=2e-6).algorithm
    assert recomputes(gaps(log_prob=1e-9), settings, before=before)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f"algorithm.name={name}" in caplog.text


@pytest.mark.parametrize("before", [False, True])
def test_without_auto_the_config_alone_decides(before):
    assert recomputes({}, config("recompute").algorithm, before=before)
    assert not recomputes({}, config("rollout").algorithm, before=before)
