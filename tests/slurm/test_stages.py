"""Trainers under a real Slurm whose replica is there already, on the head node.

So an attempt is short, and one job can have many of them.
"""

from tests.e2e.test_invariance import assert_close
from tests.e2e.test_rescue import rows_of
from tests.slurm.cluster import wait_for
from tests.slurm.conftest import STAGES, TOKEN


def test_usr1_in_every_stage_of_a_step_loses_nothing(asked, one_process):
    """One job, queued again seven times."""
    asked.ends("COMPLETED", s=400)
    for attempt, (stage, step) in enumerate(STAGES.items()):
        (log,) = asked.folder.glob(f"logs/{asked.job.number}.{attempt}/trainer-*.log")
        text = log.read_text()
        assert f"step {step} is saved; the same command continues" in text, (stage, text)
    assert asked.log.read_text().count(": queued again\n") == len(STAGES)
    one_process.ends("COMPLETED")
    assert rows_of(asked.folder) == rows_of(one_process.folder)


def test_the_killed_slurmd_of_the_first_node(submit_asked, one_process):
    """Its node's processes are left to themselves: the batch script and a rank.

    Slurm gives the node up after 10 s, ends the other rank and starts the run elsewhere.
    """
    run = submit_asked(
        "slurmd",
        "train.num_steps=3",
        sbatch=("--nodes=2",),
        MEGADIFF_TOKEN=TOKEN,
        PAUSE_S="60",
    )
    run.wait_for_checkpoint(1)
    cluster = run.job.cluster
    node, other = run.job.nodes()
    cluster.on(node, "pkill", "-KILL", "-x", "slurmd")
    wait_for(lambda: node not in run.job.nodes(), what=f"end without {node}", s=120)
    run.wait_for_log(f"job {run.job.number}.0: runs elsewhere by now", s=60)
    # the rank sees that it is alone, and nobody waits for it
    wait_for(lambda: not run.left_on(node), what=f"end of {run.left_on(node)} on {node}", s=60)
    first_attempt = f"--rdzv-id {run.job.number}.0 "
    assert not [line for line in run.left_on(other) if first_attempt in line]
    cluster.start_slurmd(node)

    run.ends("COMPLETED")
    assert run.log.read_text().count(": queued again\n") == 0
    assert (run.folder / "logs/latest").readlink().name == f"{run.job.number}.1"
    one_process.ends("COMPLETED")
    assert_close(run.rows(), one_process.steps(3))
