"""launch/torchrun.sh and launch/serve.sh: what they start on a node, and what they refuse."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STUB = """#!/bin/sh
echo "${0##*/} gpus=$CUDA_VISIBLE_DEVICES gloo=$GLOO_SOCKET_IFNAME threads=$OMP_NUM_THREADS $*"
"""


@pytest.fixture
def start(tmp_path):
    """Runs a script of launch/ in a repository whose programs only say how they were called."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, text in (("torchrun", STUB), ("megadiff", STUB), ("python", python)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        command = [str(tmp_path / "launch" / script), *arguments]
        return subprocess.run(command, env=path | environment, capture_output=True, text=True)

    return run


def test_one_node_needs_no_address(start):
    done = start("torchrun.sh", "2", "a.yaml", "seed=1")
    assert "--standalone --nproc-per-node 2 -m megadiff.cli.main train a.yaml seed=1" in done.stdout


def test_torchrun_may_open_a_connection_to_every_rank(start, tmp_path):
    (tmp_path / ".venv/bin/torchrun").write_text("#!/bin/bash\nulimit -Sn\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        done = start("torchrun.sh", "2", "a.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int(done.stdout) == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"NODE_RANK": "0"}, "NNODES=2 but no MASTER_ADDR"),
        ({"MASTER_ADDR": "10.0.0.1"}, "NODE_RANK='' of NNODES=2 machines"),
        ({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "2"}, "NODE_RANK='2' of NNODES=2 machines"),
        ({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "08"}, "NODE_RANK='08' of NNODES=2 machines"),
        ({"MASTER_ADDR": "127.0.0.1", "SLURM_NODEID": "1"}, "MASTER_ADDR=127.0.0.1 is 127.0.0.1"),
        ({"MASTER_ADDR": "a.invalid", "NODE_RANK": "1"}, "finds no way to 'a.invalid'"),
    ],
)
def test_several_nodes_must_find_each_other(start, environment, told):
    done = start("torchrun.sh", "2", "a.yaml", NNODES="2", **environment)
    assert done.returncode != 0
    assert told in done.stderr


@pytest.mark.parametrize("script", ["torchrun.sh", "serve.sh"])
def test_a_repository_without_an_environment_is_said_once(start, tmp_path, script):
    shutil.rmtree(tmp_path / ".venv")
    done = start(script, "2", "a.yaml", PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} has no .venv; run launch/setup.sh\n"


def test_replicas_share_the_gpus_of_a_node(start):
    done = start("serve.sh", "2", "a.yaml", CUDA_VISIBLE_DEVICES="4,5,6,7", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition(" --parent-pid")[0] for line in done.stdout.splitlines())
    assert lines == [
        "megadiff gpus=4,5 gloo= threads=3 serve a.yaml",
        "megadiff gpus=6,7 gloo= threads=3 serve a.yaml",
    ]
    done = start("serve.sh", "5", "a.yaml", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert done.returncode == 2
    assert "5 replicas on 4 GPUs" in done.stderr
