"""Runs under a real Slurm, on nodes with addresses, processes and /tmp of their own."""

from tests.e2e.test_invariance import _close


def test_separate(submit):
    run = submit("separate", sbatch=("--nodes=3",), ROLLOUT_NODES="1")
    run.ends("COMPLETED")
    print(run.rows())
    print(run.logs())
