"""A process takes the open files that it may have, and says before it starts that they are few."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megadiff.process import descriptors
from megadiff.process.descriptors import MOST_DESCRIPTORS, raise_soft_limit, rank_sockets

ROOT = Path(__file__).parents[3]
UNLIMITED = resource.RLIM_INFINITY
WORLD = {"sp": 1, "tp": 1, "dp_replicate": 1}


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 30, MOST_DESCRIPTORS),
        (1024, UNLIMITED, MOST_DESCRIPTORS),
        (4096, 4096, None),
        (1 << 20, 1 << 30, None),  # a user's choice is not lowered
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_the_soft_limit_is_raised(monkeypatch, soft, hard, raised):
    limits = []
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: limits.append(pair))
    raise_soft_limit()
    assert limits == ([] if raised is None else [(raised, hard)])


def test_sockets_of_a_large_world():
    assert rank_sockets(world_size=500, backend="veomni", **WORLD) == 3 * 499 + 2
    assert rank_sockets(world_size=500, backend="megatron", **WORLD) == 9 * 499 + 2
    # only three of Megatron's groups cross tp
    halves = rank_sockets(world_size=512, backend="megatron", **WORLD | {"tp": 8})
    assert halves == 5 * 511 + 4 * 63 + 7 + 2


TRAIN = """
import resource, sys
from megadiff.cli import train
from megadiff.config.schema import Config
from megadiff.parallel.mesh import Layout

hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
layout = Layout(world_size=500, dp=500, dp_replicate=1, sp=1, tp=1)
train.check = lambda *_, **__: (layout, None, None, None)
train.check_engine_installed = lambda _: None

def init_mesh(*_, **__):
    print("joined with", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    raise ValueError("enough")

train.init_mesh = init_mesh
config = Config()
config.run.dir = sys.argv[2]
try:
    train.train_rank(config, world_size=500)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hard", "texts"),
    [
        (
            1200,
            [
                "one of 500 ranks with veomni needs 1499 files open at once",
                "this process may open 1200 and has",
                "raise that limit (ulimit -Hn), or use fewer ranks",
            ],
        ),
        (2000, ["joined with 2000"]),
    ],
)
def test_a_rank_looks_at_its_limit_before_it_joins(tmp_path, hard, texts):
    command = [sys.executable, "-c", TRAIN, str(hard), str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "RANK": "3"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert all(text in done.stdout for text in texts), done.stdout + done.stderr


SERVE = """
import resource
from pathlib import Path
from megadiff.rollout.server.server import serve
from megadiff.rollout.spec import ReplicaSpec

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 300))
try:
    serve(ReplicaSpec(model=Path("none"), host="0.0.0.0"), token=None)
except ValueError:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_replica_raises_its_limit():
    """Settings that it refuses end it soon."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "300", done.stderr
