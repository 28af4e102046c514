"""A replica that breaks a contract is found before step 1, and named."""

from pathlib import Path

import pytest

from tests.e2e.conftest import GATED
from tests.e2e.servers import start_replicas, stop

BROKEN = Path(__file__).with_name("broken_replica.py")


@pytest.fixture(scope="module")
def broken(tmp_path_factory, tiny_model):
    """(fault file, registry) of one replica whose fault can be chosen."""
    folder = tmp_path_factory.mktemp("broken")
    fault = folder / "fault"
    fault.write_text("none")
    command = [str(BROKEN), str(fault), str(tiny_model), "--dtype", "float32", "--device", "cpu"]
    servers = start_replicas(1, folder=folder, command=command)
    yield fault, folder / "registry"
    stop(servers)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("round", "parity/log_prob_gap_max"),
        ("shift", "parity/schedule_gap_max"),
        ("noise", "parity/latents_gap_max"),
        ("flip", "replica_0 at version 0 holds 1 of"),
        ("skip", "transformer.proj_out.weight"),
    ],
)
def test_broken_on_purpose(trainer, broken, fault, text):
    file, registry = broken
    file.write_text(fault)
    # another start than the replica loaded from disk: a skipped tensor would otherwise hold the
    # right bits by luck
    model = _perturbed(trainer.model, trainer.folder)
    separate = ("rollout.mode=separate", f"rollout.registry={registry}")
    result = trainer.run(*separate, GATED, f"model.path={model}")
    assert result.code == 1
    assert text in result.stderr
    assert not (result.folder / "metrics.jsonl").exists() or not result.rows


GUIDED = "rollout.true_cfg_scale=4"


@pytest.mark.parametrize(
    ("fault", "where", "overrides"),
    [
        ("first_row", "group 2 of 4 (prompt 'a wide photograph", []),
        ("unmasked", "group 1 of 4", []),
        ("swapped", "group 3 of 4 (prompt '一只", []),
        ("timestep", "group 1 of 1", []),
        ("shift", "group 1 of 1", []),
        ("first_row", "group 2 of 4", [GUIDED]),
        ("unguided", "group 1 of 1", [GUIDED]),
        ("call_norm", "group 1 of 1", [GUIDED]),
    ],
)
def test_another_policy_is_refused_with_the_group_named(trainer, broken, fault, where, overrides):
    """Also where it is right for the first group of a call, and the run's calls have one only."""
    file, registry = broken
    shared = ["rollout.mode=separate", f"rollout.registry={registry}", "train.num_steps=0", GATED]
    shared += ["rollout.batch_size=4", "algorithm.group_size=4"]
    file.write_text("none")
    result = trainer.run(*shared, *overrides, name="whole")
    assert result.code == 0, result.stderr
    file.write_text(fault)
    result = trainer.run(*shared, *overrides)
    assert result.code == 1
    assert "gap_max = " in result.stderr
    assert f"in replica_0, {where}" in result.stderr


def test_a_replica_that_computes_otherwise_is_refused(trainer, broken):
    """Before any weight is sent: as a parity gap it would have no cause."""
    _, registry = broken
    result = trainer.run(
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "model.dtype=bfloat16",
    )
    assert result.code == 1
    assert (
        "holds weights in float32, the run has model.dtype=bfloat16; restart it with "
        "--dtype bfloat16, or" in result.stderr
    )


def test_warn_trains_all_the_same(trainer, broken):
    file, registry = broken
    file.write_text("round")
    result = trainer.run(
        "rollout.mode=separate",
        f"rollout.registry={registry}",
        "parity.mode=warn",
        "train.num_steps=1",
    )
    assert result.code == 0, result.stderr
    assert "parity.mode=warn, training goes on" in result.stderr
    assert result.rows[0]["parity/log_prob_gap_max"] > 5e-5


def test_auto_recomputes_where_rounding_reaches_the_clip_range(trainer, broken):
    """Of the replica's log_probs every ratio would be clipped at the first update; of the trainer's
    own none is. A run that resumes goes on as it began, also beside a replica that agrees.
    """
    file, registry = broken
    file.write_text("nudge")
    settings = ["rollout.mode=separate", f"rollout.registry={registry}", "train.updates_per_step=1"]
    settings += ["algorithm.old_log_prob=auto", "algorithm.clip_range=1e-6", GATED]
    result = trainer.run(*settings, "train.num_steps=1")
    assert result.code == 0, result.stderr
    (row,) = result.rows
    gap = row["parity/log_prob_gap_max"]
    assert 3.9e-6 < gap < 4.2e-6
    assert (
        f"the parity gap {gap:.2e} is not below half of algorithm.clip_range, 5.00e-07"
        in result.stderr
    )
    assert row["policy/clip_fraction"] == 0
    assert row["policy/importance_mean"] == pytest.approx(
        1 - 4e-6, abs=2e-7
    )  # the replica claims to be that much likelier
    file.write_text("none")
    result = trainer.run(*settings, "train.num_steps=2")
    assert result.code == 0 and "resumed from" in result.stderr, result.stderr
    assert (
        "algorithm.old_log_prob=auto: old log_probs are the trainer's, as before" in result.stderr
    )
    assert abs(result.rows[1]["policy/importance_mean"] - 1) < 1e-7


def _perturbed(model: Path, folder: Path) -> Path:
    """The model with one tensor of its transformer changed."""
    import shutil

    from safetensors.torch import load_file, save_file

    copy = folder / "perturbed"
    shutil.copytree(model, copy)
    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["proj_out.weight"] *= 1.01
    save_file(tensors, path)
    return copy
