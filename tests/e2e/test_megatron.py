"""The Megatron engine behind the same command: it gives the VeOmni engine's run, and resumes into
another layout. Gradients of more layouts are compared in tests/distributed.
"""

from functools import partial

import pytest
import torch

from tests.e2e.conftest import GATED, train_rank
from tests.extra import extra

MEGATRON = "engine.backend=megatron"
LAYOUTS = {  # number of processes, overrides; sequence parallelism is on unless it is switched off
    "tp1": (1, []),
    "tp2_whole_tokens": (2, ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    "tp2_dp2": (4, ["parallel.tp=2", "parallel.dp=2"]),
}
SAME = ("reward/mean", "loss/policy", "optim/grad_norm", "policy/kl_ref")
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def runs(in_ranks, registry):
    """Runs `megadiff train` on this many ranks."""
    shared = [
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "algorithm.kl_coef=0.04",
        "rollout.num_replicas=2",
    ]
    return lambda name, num_processes, *overrides, **worker: in_ranks(
        name, num_processes, *shared, *overrides, **worker
    )


@pytest.fixture(scope="module")
def reference(runs):
    """Three steps of the VeOmni engine on one process."""
    return runs("reference", 1).rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_veomni_engines_metrics(name, runs, reference):
    num_processes, overrides = LAYOUTS[name]
    result = runs(name, num_processes, MEGATRON, GATED, *overrides)
    _close(result.rows, reference)
    assert result.rows[0]["parity/log_prob_gap_max"] <= 1e-5


@extra  # gradients of compiled blocks: tests/distributed/test_megatron_compiled.py
def test_compiled_blocks_give_the_same_metrics(runs, tmp_path):
    """In one step of prompts of one length: each shape is a variant, compiled for seconds."""
    prompts = tmp_path / "prompts.txt"
    texts = ("circle", "square", "kettle", "pencil")
    prompts.write_text("".join(f"a big red {text}\n" for text in texts))
    shared = [f"data.prompts={prompts}", "train.num_steps=1"]
    # as many rows as the gate's second call has for each text
    shared += ["train.microbatch_size=2"]
    plain = runs("plain", 1, *shared).rows

    compiled = ["parallel.tp=2", "engine.compile=true", "engine.activation_memory_budget=0.25"]
    result = runs("compiled", 2, MEGATRON, GATED, *shared, *compiled, worker=_train_compiled)
    _close(result.rows, plain)
    assert result.rows[0]["parity/log_prob_gap_max"] <= 1e-5


def _train_compiled(arguments: list[str]) -> None:
    """Without the kernels of torch's own compiler, which would be made for minutes on a CPU."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    train_rank(arguments)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def test_resumed_on_another_engine_and_layout(runs, reference):
    runs("moved", 2, MEGATRON, "parallel.tp=2", "train.num_steps=1")
    runs("moved", 2, "parallel.dp=2", "train.num_steps=2")
    _close(runs("moved", 2, MEGATRON, "parallel.sp=2").rows, reference)


def _close(rows, reference):
    for row, expected in zip(rows, reference, strict=True):
        for key in SAME:
            # loss/policy is a mean of terms of ± advantage that cancel to 1e-5 on policy: relative
            # to a thousandth of them
            scale = max(abs(expected[key]), 1e-3 if key == "loss/policy" else 0)
            assert abs(row[key] - expected[key]) <= TOLERANCE * scale, (
                row["step"],
                key,
                row[key],
                expected[key],
            )
