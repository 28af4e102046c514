"""The engine benchmark as it is called, on the tiny model: one line a layout, a failure named."""

import json
from argparse import Namespace
from pathlib import Path

import bench_engine
import pytest
import torch
from one_rank import calls, check_called, repeat_own, take_own

from megadiff.config.load import load_config
from megadiff.engines.microbatch import loss_inputs, microbatches
from megadiff.models.registry import build_adapter

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs/quickstart.yaml")


@pytest.mark.slow
def test_a_line_for_every_layout(tiny_model, tmp_path, capfd):
    options = ["--gpus=1", "--size=64", "--rows=4", "--repeat=1"]
    folders = [f"--model={tiny_model}", f"--scratch={tmp_path}"]
    layouts = ["engine.backend=megatron", "parallel.sp=3"]
    asked = [f"--layout={layout}" for layout in layouts]
    code = bench_engine.main([CONFIG, "run.device=cpu", *options, *folders, *asked])
    done, failed = (
        json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")
    )
    assert code == 1
    assert [row["layout"] for row in (done, failed)] == layouts
    assert done["update_s"] > 0 and done["grad_norm"] > 0 and done["rows"] == 4
    assert "world_size=1 is not a multiple of sp*tp = 3*1 = 3" in failed["failed"]


@pytest.mark.slow
def test_one_rank_of_many(tiny_model, tmp_path, capfd):
    options = f"--model {tiny_model} --gpus 1 --size 64 --rows 8 --repeat 1 --rank-of 4".split()
    layout = ["--layout", "engine.backend=veomni parallel.dp_replicate=2"]
    assert not bench_engine.main(
        [CONFIG, "run.device=cpu", *options, "--scratch", str(tmp_path), *layout]
    )
    (done,) = (
        json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")
    )
    assert (
        (done["ranks"], done["rows"]) == (4, 8) and done["grad_norm"] > 0 and done["update_s"] > 0
    )


@pytest.mark.parametrize("override", ["parallel.sp=2", "parallel.tp=2", "engine.backend=megatron"])
def test_what_more_than_fsdp2_splits_is_no_single_ranks(override, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = load_config([CONFIG, "engine.backend=veomni", override])
    with pytest.raises(
        ValueError, match=f"{override.partition('.')[2]}.*use engine.backend=veomni"
    ):
        bench_engine._pretend(4, config)


def test_other_collectives_than_the_stand_ins_are_noticed(monkeypatch):
    monkeypatch.setitem(calls, "gather", 1)
    monkeypatch.setitem(calls, "reduce", 0)
    with pytest.raises(RuntimeError, match="did not reduce by .*reduce_scatter_single"):
        check_called()
    monkeypatch.setitem(calls, "reduce", 1)
    check_called()


def test_what_one_rank_has_stands_for_the_others():
    whole = torch.zeros(8)
    whole[:2] = torch.tensor([1.0, 2.0])
    repeat_own(whole, whole[:2])  # in place, as FSDP2 gathers
    assert whole.tolist() == [1, 2] * 4
    other = torch.zeros(4)
    repeat_own(other, torch.tensor([5.0, 6.0]))
    assert other.tolist() == [5, 6, 5, 6]
    part = torch.zeros(2)
    take_own(part, torch.arange(8.0))
    assert part.tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="shape"):
        take_own(torch.zeros(3), torch.arange(8.0))


def test_every_row_has_a_gradient(tiny_model):
    """Rows without one would be cheaper: products with zeros draw less power."""
    config = load_config([CONFIG, f"model.path={tiny_model}"])
    adapter, mesh = build_adapter(tiny_model), Namespace(dp=1, dp_rank=0)
    batch = bench_engine.synthetic_batch(config, adapter, mesh, rows=8, text_tokens=4)
    (piece,) = microbatches(batch, torch.arange(8), 8, torch.device("cpu"))
    velocity_BLC = torch.zeros_like(piece.latents_BLC, requires_grad=True)
    bench_engine.LOSS(loss_inputs(batch, piece, velocity_BLC)).loss_sum.backward()
    assert (velocity_BLC.grad.flatten(1).abs().sum(1) > 0).all()
