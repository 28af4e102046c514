"""The FP8 comparison as it is called, on the tiny model and compiled by a backend that is quick."""

import json
from functools import partial
from pathlib import Path

import bench_fp8
import pytest
import torch

from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_losses_and_gradients_of_both_precisions(tiny_model, tmp_path):
    run_ranks(_worker, 1, tiny_model, tmp_path)
    text = (tmp_path / "out.txt").read_text()
    _, plain, fp8 = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    assert (plain["fp8"], fp8["fp8"]) == ("none", "tensorwise")
    assert plain["gradient_cosine"] == {}
    assert fp8["gradient_cosine"].keys() == {"0", "2", "4"}
    # below 1: the second gradient is without FP8, compiled code notwithstanding
    assert all(0.98 < cosine < 0.9999 for cosine in fp8["gradient_cosine"].values())
    assert len(plain["losses"]) == len(fp8["losses"]) == 4
    assert fp8["losses"] == pytest.approx(plain["losses"], rel=0.02)
    assert fp8["losses"] != plain["losses"]


def _worker(model: Path, folder: Path) -> None:
    """In a process of its own: VeOmni changes diffusers' classes."""
    torch.compile = partial(torch.compile, backend="eager")
    options = ["--layers=0", "--updates=4", "--every=2", "--rows=4", "--captions=2"]
    options += [f"--model={model}", "--text-tokens=5", "--fp8", "tensorwise"]
    config = [str(ROOT / "configs/quickstart.yaml"), "run.device=cpu", "engine.dtype=bfloat16"]
    config += ["engine.compile=true", "optim.lr=1e-3"]
    with (folder / "out.txt").open("w") as out:
        bench_fp8.print = partial(print, file=out)
        assert bench_fp8.main([*config, *options]) == 0
    assert not torch._dynamo.utils.counters["graph_break"]
