"""Runs of the tiny model under a real Slurm, on nodes with addresses and /tmp of their own.

Their metrics are those of one process on one node, to rounding.
"""

from tests.e2e.test_invariance import assert_close
from tests.slurm.conftest import NODES


def test_separate_run_goes_on_after_a_stop_and_after_a_killed_rank(submit, one_process):
    """Two nodes train, a third one samples: three attempts of one job."""
    run = submit("separate", "train.num_steps=6", sbatch=("--nodes=3",), ROLLOUT_NODES="1")
    cluster = run.job.cluster
    run.wait_for_checkpoint(1)
    for node in NODES:  # everybody on a host can read command lines
        commands = cluster.on(node, "bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        token = f"[0-9a-f]{'{64}'}"
        cluster.on(node, "bash", "-c", f'! grep -qE "{token}" <<<"$0"', commands)

    run.job.signal("--batch", "--signal=USR1")
    run.wait_for_log(f"job {run.job.number}.1: ")
    assert "asked to stop, 300 s are left" in run.log.read_text()
    stopped_at = len(run.rows())
    assert 1 <= stopped_at < 5

    run.wait_for_checkpoint(stopped_at + 1)
    title = f"^megadiff {run.folder.name}: rank "
    cluster.on(run.job.nodes()[1], "pkill", "-KILL", "-f", title)
    run.ends("COMPLETED")
    one_process.ends("COMPLETED")
    log = run.log.read_text()
    assert log.count(": queued again\n") == 2, log
    assert (run.folder / "logs/latest").readlink().name == f"{run.job.number}.2"
    assert_close(run.rows(), one_process.steps(6))


def test_colocated_run_of_two_nodes(submit, one_process):
    keys = ("train.num_steps=3", "rollout.sleep=always")
    run = submit("colocated", *keys, sbatch=("--nodes=2",), RANKS="2")
    run.ends("COMPLETED")
    one_process.ends("COMPLETED")
    assert_close(run.rows(), one_process.steps(3))


def test_mistakes_in_the_config_end_the_job_before_anything_starts(submit):
    unknown = submit("unknown", "nowhere.yaml", sbatch=("--nodes=1",))
    uneven = submit("uneven", sbatch=("--nodes=2",), RANKS="3")
    for run, told in (
        (unknown, "no config file nowhere.yaml"),
        (uneven, "train.prompts_per_step=4 is not a multiple of dp=6"),
    ):
        run.ends("FAILED", s=60)
        assert told in run.log.read_text()
        assert not run.folder.exists()
