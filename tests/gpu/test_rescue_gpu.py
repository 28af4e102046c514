"""A rank that fails under NCCL leaves the others in collectives that never end: their steps are
saved all the same.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from marked import kill_left

from megadiff.checkpoint.run_folders import whole_looking

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SECONDS = 300  # for one run; compiled, the fault comes after 150 s
MARK = "MEGADIFF_RESCUE_GPU"
FAULT = "reward.fault.type=tests.e2e.failing_step:FailingStep"


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("veomni", ["parallel.dp=2"]),
        # the other rank may load a compiled kernel beside a collective that never ends, and then
        # its collectives are aborted (test_stuck_gpu.py)
        ("veomni", ["parallel.dp=2", "engine.compile=true"]),
        ("megatron", ["parallel.tp=2"]),
    ],
)
def test_one_ranks_error_saves_every_ranks_part(tiny_model, tmp_path, backend, layout):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} visible")
    groups_per_step = 4 if backend == "veomni" else 8
    fault = [
        FAULT,
        "reward.fault.args.kind=out_of_memory",
        f"reward.fault.args.rank={1 if backend == 'veomni' else 0}",
        f"reward.fault.args.groups_per_step={groups_per_step}",
    ]
    failed = _train(tiny_model, tmp_path, backend, *layout, *fault, num_processes=2)
    assert failed.returncode == 1
    assert "CUDA out of memory" in failed.stderr
    assert "the same command continues from there" in failed.stderr, failed.stderr[-3000:]
    folder = tmp_path / "quickstart"
    assert [path.name for path in whole_looking(folder / "checkpoints")] == ["step_000003"]
    again = _train(
        tiny_model, tmp_path, "veomni", "parallel.dp=1", FAULT, "reward.fault.args.step=1000"
    )
    assert again.returncode == 0, again.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


def _train(
    model: Path, folder: Path, backend: str, *overrides: str, num_processes: int = 1
) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "megadiff.cli.train"]
    if num_processes > 1:
        module = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num_processes),
        ]
        launcher = [sys.executable, *module, "-m", "megadiff.cli.train"]
    command = [
        *launcher,
        str(ROOT / "configs" / "quickstart.yaml"),
        f"model.path={model}",
        f"run.dir={folder}",
        "run.device=cuda",
        "track=[]",
        "eval.every=0",
        "train.num_steps=5",
        "rollout.num_replicas=1",
        f"engine.backend={backend}",
        *overrides,
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    mark = secrets.token_hex(8)
    environment = os.environ | {"PYTHONPATH": path, MARK: mark}
    here = {"text": True, "cwd": ROOT, "env": environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **here)
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        stacks = ""
        try:
            run = str(folder / "quickstart")
            command = [sys.executable, "-m", "megadiff.cli.main", "stacks", run]
            stacks = subprocess.run(
                command, stdout=subprocess.PIPE, timeout=60, check=False, **here
            ).stdout
        finally:
            # ranks whose launcher is gone as well: they may hang with their GPU
            kill_left(MARK, mark, after_s=0.0)
        _, errors = process.communicate(timeout=30)
        pytest.fail(f"not done after {SECONDS} s\n{stacks}\n{errors[-5000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
