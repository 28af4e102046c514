"""Weights between a trainer's GPU and a replica: through opened memory on one GPU, by NCCL to
another.
"""

import json

import bench_sync
import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("gpu", "transport", "way"),
    [(0, "shm", "cuda_ipc"), (1, "nccl", "nccl"), (0, "nccl", None), (1, "shm", None)],
)
def test_a_verified_push(gpu, transport, way, tiny_model, tmp_path, capfd):
    """Whole weights and LoRA, each more than once, in buckets smaller than the model; the pairs
    that cannot be say so.
    """
    if gpu >= torch.cuda.device_count():
        pytest.skip(f"needs {gpu + 1} GPUs, {torch.cuda.device_count()} are visible")
    folders = [f"--model={tiny_model}", f"--scratch={tmp_path}"]
    options = ["--dtype=float32", "--bucket-mib=1", "--repeat=2", "--lora-rank=4"]
    code = bench_sync.main([*folders, *options, f"--transport={transport}", f"--gpu={gpu}"])
    rows = [
        json.loads(line)
        for line in capfd.readouterr().out.splitlines()
        if line.startswith('{"transport"')
    ]
    assert [row["what"] for row in rows] == ["all weights", "lora"]
    if way is None:
        assert code == 1 and all("GPU" in row["failed"] for row in rows)
    else:
        assert code == 0 and all(row["way"] == way and row["seconds"] > 0 for row in rows)
