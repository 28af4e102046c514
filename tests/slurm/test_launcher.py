"""The launcher under a real Slurm, with stub.sh in place of trainer and replicas.

Times are those of cluster.sh: a job is requeued after 5 s, a silent node is given up after 10 s.
"""

import contextlib
import re
import subprocess

import pytest

from tests.slurm.cluster import wait_for
from tests.slurm.conftest import ROOT

TWO = ("--nodes=2",)


def test_a_separate_run_has_addresses_a_token_and_a_log_of_each_node(submit_stub):
    """And a rank on each GPU of the node, though the job has asked for none.

    NODE_RANK is left in the submitting shell by a start without Slurm. A step of somebody keeps the
    first node busy, and Slurm takes idle nodes before it where a step does not name its own.
    """
    busy = "/usr/bin/srun --nodes=1 --ntasks=1 --nodelist=node1 sleep 8 >/dev/null 2>&1 &"
    once = f"mkdir {submit_stub.folder}/busy 2>/dev/null"
    srun = submit_stub.repository / ".venv/bin/srun"
    srun.write_text(f'#!/bin/sh\nif {once}; then {busy} sleep 2; fi\nexec /usr/bin/srun "$@"\n')
    srun.chmod(0o755)
    nvidia_smi = submit_stub.repository / ".venv/bin/nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho 0\necho 1\n")
    nvidia_smi.chmod(0o755)
    settings = {"ROLLOUT_NODES": "1", "REPLICAS": "2", "NODE_RANK": "1"}
    run = submit_stub("separate", sbatch=("--nodes=3",), **settings)
    run.ends("COMPLETED")
    nvidia_smi.unlink()
    srun.unlink()
    logs = {path.name: path.read_text() for path in run.folder.glob("logs/latest/*.log")}
    first, second, replicas = (
        logs[name] for name in sorted(logs, key=lambda name: name.split("-")[1])
    )
    assert sorted(logs) == ["replicas-node3.log", "trainer-node1.log", "trainer-node2.log"]
    for text in (first, second):
        assert "GLOO_SOCKET_IFNAME=eth0" in text
        assert "--nnodes 2" in text and "--rdzv-endpoint 10.213.7.1:" in text
        assert "--nproc-per-node 2 " in text
    assert "is_host=1" in first and "--local-addr 10.213.7.1 " in first
    assert "is_host=0" in second and "--local-addr 10.213.7.2 " in second
    attempt = f"{run.job.number}.0"
    for text in (first, second, replicas):
        assert f"rollout.mode=separate rollout.registry={run.folder}/replicas/{attempt}" in text
        assert "rollout.num_replicas=2" in text
    assert replicas.count("MASTER_ADDR=10.213.7.1 token=64") == 2


GPUS = ("--partition=gpus", *TWO)


def test_all_gpus_of_the_nodes_are_used_however_they_are_asked_for(submit_stub):
    """Slurm gives the steps none, or all of the job on one node, or counts them nowhere."""
    runs = [
        submit_stub("none_asked %j é", "steps=1", sbatch=GPUS),
        submit_stub("of_the_job", "steps=1", sbatch=(*GPUS, "--gpus=8")),
        submit_stub(
            "of_tasks", "steps=1", sbatch=(*GPUS, "--gpus-per-task=4", "--cpus-per-task=2")
        ),
    ]
    for run in runs:
        run.ends("COMPLETED")
    folders = [run.folder for run in runs]

    folders.append(submit_stub.folder / "allocated")
    command = ("launch/slurm.sh", "stub.yaml", f"run.dir={submit_stub.folder}", "steps=1")
    with contextlib.chdir(submit_stub.repository):
        submit_stub.cluster.login(
            "salloc", *GPUS, "--gpus-per-node=4", *command, "run.name=allocated"
        )
    for folder in folders:
        logs = [path.read_text() for path in folder.glob("logs/latest/trainer-node*.log")]
        assert len(logs) == 2
        for text in logs:
            assert "gpus=4" in text and "--nproc-per-node 4 " in text, text


def test_a_preempted_job_goes_on_though_it_has_saved_nothing(submit_stub):
    """Its time limit is far away; Slurm ends its steps and gives it 30 s.

    The controller does not answer the first question, as a busy one may not. Then it says that it
    is still sending the job its signals.
    """
    squeue = submit_stub.repository / ".venv/bin/squeue"
    asked = submit_stub.folder / "asked"
    fails_once = f"mkdir {asked} 2>/dev/null && exit 1"
    squeue.write_text(f'#!/bin/sh\n{fails_once}\n/usr/bin/squeue "$@" | sed s/RUNNING/SIGNALING/\n')
    squeue.chmod(0o755)
    run = submit_stub("preempted", "step_s=4", "steps=1", sbatch=GPUS)
    run.wait_for_log(f"job {run.job.number}.0: ")
    wait_for(lambda: "trainer" in run.job.steps(), what="the trainer's step")
    urgent = ("--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true")
    run.job.cluster.login("sbatch", *TWO, *urgent)
    run.wait_for_log(f"job {run.job.number}.0: preempted")
    assert asked.exists()
    squeue.unlink()
    run.ends("COMPLETED")


def test_a_name_that_means_loopback_on_its_own_node(submit_stub):
    """As Debian's installer writes /etc/hosts."""
    cluster = submit_stub.cluster
    hosts = cluster.folder / "etc/hosts"
    for node in ("node1", "node2"):
        own = cluster.folder / f"hosts.{node}"
        own.write_text(f"127.0.1.1 {node}\n{hosts.read_text()}")
        cluster.on(node, "mount", "--bind", str(own), "/etc/hosts")
    run = submit_stub("loopback", "steps=1", sbatch=(*TWO, "--nodelist=node[1-2]"))
    run.ends("COMPLETED")
    for node in ("node1", "node2"):
        cluster.on(node, "umount", "/etc/hosts")
    text = (run.folder / "logs/latest/trainer-node1.log").read_text()
    assert "--local-addr 10.213.7.1 " in text and "GLOO_SOCKET_IFNAME=eth0" in text


def test_a_stop_before_the_first_step_is_passed_on_and_the_run_goes_on(submit_stub):
    run = submit_stub("early", sbatch=TWO)
    run.wait_for_log(f"job {run.job.number}.0: ")
    run.job.signal("--batch", "--signal=USR1")
    run.wait_for_log(f"job {run.job.number}.1: ")
    run.ends("COMPLETED")
    logs = [path.read_text() for path in run.folder.glob("logs/*.0/trainer-node1.log")]
    assert re.search(r"stops after step \d+, (29\d|300) s are left", logs[0])


def test_scancel_ends_all_nodes_and_is_final(submit_stub):
    run = submit_stub("scancel", "steps=1000", sbatch=("--nodes=3",), ROLLOUT_NODES="1")
    run.wait_for_checkpoint(2)
    run.job.signal()
    run.ends("CANCELLED")


def test_a_rank_that_hangs_is_killed(submit_stub):
    """TERM does not end it; KILL does after the cluster's KillWait of 5 s."""
    run = submit_stub("hangs", "steps=1000", "hang=1", sbatch=TWO)
    run.wait_for_checkpoint(2)
    run.job.signal()
    run.ends("CANCELLED")


def test_nodes_that_lose_their_power(submit_stub):
    """Slurm starts both runs again: one lost the node of its batch script, one another node."""
    runs = [submit_stub(f"lost_{index}", "step_s=1", "steps=12", sbatch=TWO) for index in (0, 1)]
    for run in runs:
        run.wait_for_checkpoint(2)
    cluster = runs[0].job.cluster
    lost = [run.job.nodes()[index] for index, run in enumerate(runs)]
    for node in lost:
        cluster.power(node, on=False)
    for node, run in zip(lost, runs):
        wait_for(lambda: node not in run.job.nodes(), what=f"end without {node}", s=120)  # noqa: B023
    for node in lost:
        cluster.power(node, on=True)
    for run in runs:
        run.ends("COMPLETED")
        assert f"job {run.job.number}.1: " in run.log.read_text()


def test_a_killed_step_is_started_again_as_it_had_saved(submit_stub):
    run = submit_stub("step", "steps=30", sbatch=TWO)
    # long enough to be still there when its turn comes
    once = submit_stub("once", "steps=300", sbatch=(*TWO, "--no-requeue"))
    for each in (run, once):
        each.wait_for_checkpoint(2)
        steps = each.job.steps()
        each.job.cluster.login("scancel", "--signal=KILL", steps["trainer"])
    run.wait_for_log(f"job {run.job.number}.1: ")
    run.ends("COMPLETED")
    once.ends("FAILED")
    assert "not queued again, as sbatch --no-requeue allows one" in once.log.read_text()


def test_a_run_that_fails_before_its_first_save_is_not_queued_again(submit_stub):
    """One that has saved before may fail once so, and not twice."""
    twice = submit_stub("twice", "fail_at=2", sbatch=TWO)
    run = submit_stub("no_save", "step_s=100", sbatch=TWO)
    wait_for(lambda: "trainer" in run.job.steps(), what="the trainer's step")
    run.job.cluster.login("scancel", "--signal=KILL", run.job.steps()["trainer"])
    run.ends("FAILED")
    twice.ends("FAILED")
    assert "not queued again, as it saved no step" in run.log.read_text()
    text = twice.log.read_text()
    assert text.count(": queued again\n") == 2 and text.count(": saved nothing after 2; ") == 1
    assert f"job {twice.job.number}.2: not queued again, as it saved no step" in text


def test_no_replica_is_left(submit_stub):
    run = submit_stub(
        "no_replica", "serve_s=1", "step_s=100", sbatch=TWO, ROLLOUT_NODES="1", REPLICAS_GONE_S="2"
    )
    run.ends("FAILED")
    assert "no replica is left; see " in run.log.read_text()


def test_mistakes_are_told_at_once(submit_stub, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/torchrun.sh").touch()
    none_trains = submit_stub("none_trains", sbatch=TWO, ROLLOUT_NODES="2")
    no_venv = submit_stub("no_venv", sbatch=(f"--chdir={tmp_path}",))
    elsewhere = submit_stub("elsewhere", sbatch=("--chdir=/usr",))
    not_shared = submit_stub("not_shared", "run.dir=/tmp", sbatch=TWO)
    for run, told in (
        (none_trains, "ROLLOUT_NODES=2 of the job's 2 nodes are to sample, none is left to train"),
        (no_venv, f"{tmp_path} has no .venv; run launch/setup.sh there"),
        (elsewhere, "/usr is no repository of megadiff; submit from there"),
        (not_shared, "NODE does not see /tmp/not_shared/logs/"),
    ):
        run.ends("FAILED")
        # which nodes are free depends on how fast earlier jobs leave them
        log = re.sub(r"error: node\d+ ", "error: NODE ", run.log.read_text())
        assert f"error: {told}" in log


@pytest.mark.parametrize("image", ["", "image.sqsh"])
def test_dry_run_prints_the_commands_and_starts_nothing(submit_stub, image):
    settings = {"NODES": "10", "GPUS": "8", "ROLLOUT_NODES": "08", "CONTAINER_IMAGE": image}
    jobs = submit_stub.cluster.jobs()
    done = subprocess.run(
        [str(ROOT / "launch/slurm.sh"), "--dry-run", "a.yaml", "run.dir=/runs", "run.name=a"],
        env={"PATH": "/usr/bin:/bin", **settings},
        cwd=submit_stub.repository,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "# 2 nodes train, 8 ranks each" in lines and "export NNODES=2" in lines
    replicas, trainer = (line for line in lines if line.startswith("srun"))
    assert "launch/serve.sh 8 a.yaml" in replicas and "--nodes=8" in replicas
    assert r"--nodelist=NODE_\[1-2\] " in trainer and r"--nodelist=NODE_\[3-10\] " in replicas
    assert "rollout.num_replicas=64" in replicas
    assert "launch/torchrun.sh 8 a.yaml" in trainer and "--nodes=2" in trainer
    for line in (replicas, trainer):
        assert ("--container-image=image.sqsh --container-mounts=" in line) == bool(image)
    assert submit_stub.cluster.jobs() == jobs
