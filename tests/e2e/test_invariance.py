"""The same run under every layout, with one and two replicas; resumed and uninterrupted; parity on
policy.
"""

import socket
import subprocess
import sys

import pytest

from tests.e2e.conftest import ENVIRONMENT, GATED, Result
from tests.extra import extra

LAYOUTS = {
    "sp2": (2, ["parallel.sp=2"]),
    "dp2_sp2": (4, ["parallel.dp=2", "parallel.sp=2"]),
}
SAME = ("reward/mean", "loss/policy", "optim/grad_norm", "policy/kl_ref")
MACHINE = ("time/", "perf/", "memory/")  # what a clock or the machine decides


@pytest.fixture(scope="module")
def shared(registry):
    return ["rollout.mode=separate", f"rollout.registry={registry}", "algorithm.kl_coef=0.04"]


@pytest.fixture(scope="module")
def reference(shared, tmp_path_factory, tiny_model):
    """Six steps on one process, one replica."""
    from tests.e2e.conftest import Trainer

    result = Trainer(tmp_path_factory.mktemp("reference"), tiny_model).run(
        *shared, GATED, "train.num_steps=6", name="whole"
    )
    assert result.code == 0, result.stderr
    return result.rows


def assert_close(rows, reference, *, keys=SAME):
    for row, expected in zip(rows, reference, strict=True):
        for key in keys:
            # loss/policy is a mean of terms of ± advantage that cancel to 1e-5 on policy: relative
            # to a thousandth of them
            scale = max(abs(expected[key]), 1e-3 if key == "loss/policy" else 0)
            assert abs(row[key] - expected[key]) <= 1e-4 * scale, (
                row["step"],
                key,
                row[key],
                expected[key],
            )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_does_not_matter(in_ranks, shared, reference, name):
    num_processes, overrides = LAYOUTS[name]
    result = in_ranks(name, num_processes, *shared, *overrides, "rollout.num_replicas=2")
    assert_close(result.rows, reference[:3])


@extra  # under Slurm: tests/slurm/test_slurm.py
def test_colocated_on_two_nodes(trainer, reference):
    """A torchrun for each node, whose rank starts a replica of its own: it is a world of its own.
    It sleeps, as on a GPU, while the trainer works.
    """
    overrides = ("parallel.dp=2", "algorithm.kl_coef=0.04", "rollout.sleep=always", GATED)
    command = trainer.command(*overrides)[3:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [*launcher, f"--node-rank={node}", "-m", "megadiff.cli.main", "train", *command],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            cwd=trainer.folder,
        )
        for node in range(2)
    ]
    errors = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors

    run = Result(code=0, stderr="", folder=trainer.folder / "run")
    assert_close(run.rows, reference[:3])
    assert len(list((run.folder / "logs").glob("replica_*.log"))) == 2
    # the gate asked a replica of each node; both ended with the run
    assert not list((run.folder / "replicas").glob("node_*/*.json"))


def test_number_of_replicas_does_not_matter(in_ranks, shared, reference):
    assert_close(in_ranks("replicas", 1, *shared, "rollout.num_replicas=2").rows, reference[:3])


def test_on_policy(reference):
    first = reference[0]
    assert first["parity/log_prob_gap_max"] <= 1e-5


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("guided", []),
        (
            "one_noise",
            ["rollout.same_noise=true", "rollout.ode_solver=dpm2", "rollout.sde_window_moves=1"],
        ),
    ],
)
def test_on_policy_with_one_update_and_guidance(in_ranks, shared, name, overrides):
    """CFG 4 multiplies any mismatch; one update, so that every figure is that of the policy which
    sampled.
    """
    once = ("rollout.true_cfg_scale=4", "train.updates_per_step=1", "train.num_steps=1")
    (row,) = in_ranks(name, 1, *shared, GATED, *once, *overrides).rows
    assert row["parity/log_prob_gap_max"] <= 1e-4
    assert row["policy/kl_old"] <= 1e-6 and row["policy/clip_fraction"] == 0


def test_three_resume_three_is_six(trainer, shared, reference):
    first = trainer.run(*shared, GATED, "train.num_steps=3", name="halves")
    assert first.code == 0, first.stderr
    second = trainer.run(*shared, GATED, "train.num_steps=6", name="halves")
    assert second.code == 0, second.stderr
    assert "resumed from" in second.stderr
    for row, expected in zip(second.rows, reference, strict=True):
        assert _deterministic(row) == _deterministic(expected)  # bit for bit


def test_recomputed_old_log_probs_are_those_of_the_rollout(in_ranks, shared, reference):
    assert_close(
        in_ranks("recomputed", 1, *shared, "algorithm.old_log_prob=recompute").rows, reference[:3]
    )


def _deterministic(row):
    return {key: value for key, value in row.items() if not key.startswith(MACHINE)}
