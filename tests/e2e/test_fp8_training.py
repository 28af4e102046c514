"""A run whose trainer multiplies in FP8, by the command line and real replicas."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import GATED, Trainer

GAP = "parity/log_prob_gap_max"


def test_a_run_trains_in_fp8_on_its_own_log_probs(trainer: Trainer, registry: Path) -> None:
    """Replicas are in float32 here, so the gate sees all of FP8's rounding, and says what it does.

    clip_range is 1e-4, the limit for replicas' log_probs half of it.
    """
    result = trainer.run(
        "engine={fp8: tensorwise, dtype: bfloat16}",
        "algorithm.old_log_prob=auto",
        GATED,
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "train.num_steps=2",
    )
    assert result.code == 0, result.stderr
    assert "24 linears multiply in FP8, scaled tensorwise" in result.stderr
    assert "from here on old log_probs are the trainer's" in result.stderr

    first, second = result.rows
    assert 5e-5 < first[GAP] < 5e-2
    assert second["step"] == 2
    assert all(row["optim/grad_norm"] > 0 for row in (first, second))


def test_both_sides_in_fp8_with_lora_on_one_base(trainer: Trainer) -> None:
    """They round alike, so they are nearer to each other than to a replica in bfloat16."""
    both = ("engine={fp8: tensorwise, dtype: bfloat16}", "model.dtype=bfloat16")
    lora = ("lora={rank: 4, alpha: 8}", "algorithm.old_log_prob=auto", "train.num_steps=2")
    streams = "model.float32_streams=true"  # else bfloat16's rounding of streams is most of the gap
    gaps = []
    for name, fp8 in (("both", "true"), ("trainer", "false")):
        result = trainer.run(*both, *lora, streams, GATED, f"rollout.fp8={fp8}", name=name)
        assert result.code == 0, result.stderr
        assert "24 linears multiply in FP8, scaled tensorwise" in result.stderr
        gaps.append(result.rows[0][GAP])
        assert all(row["optim/grad_norm"] > 0 for row in result.rows)
        # the base is never sent: it is mapped
        assert 0 < result.rows[1]["sync/gib"] == result.rows[0]["sync/gib"]
    assert gaps[0] < 0.7 * gaps[1]
