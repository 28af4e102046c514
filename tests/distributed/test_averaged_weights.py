"""The learning rate's schedule and the running average of the weights, on both engines, of one and
two ranks, with LoRA of that.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megadiff.algorithms.flow_matching import flow_matching
from megadiff.config.schema import Config
from megadiff.engines import build_engine
from megadiff.engines.engine import Engine
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.types import FlowBatch, Sampling
from tests.distributed.engines import sent_weights
from tests.distributed.ranks import run_ranks

SAMPLING = Sampling(height=48, width=48, num_inference_steps=4)
DECAY, LR, WARMUP_STEPS, NUM_STEPS = 0.25, 1e-3, 3, 9


@pytest.mark.parametrize(
    ("backend", "world_size", "rank"),
    [("veomni", 1, 0), ("veomni", 2, 3), ("veomni", 2, 0), ("megatron", 2, 0)],
)
def test_warm_up_average_swap_and_checkpoint(
    backend: str, world_size: int, rank: int, tiny_model: Path, tmp_path: Path
) -> None:
    run_ranks(_worker, world_size, tiny_model, tmp_path, backend, rank)


def _worker(model: Path, out: Path, backend: str, rank: int) -> None:
    engine = _engine(model, backend, decay=DECAY, rank=rank)
    expected, rates = sent_weights(engine), []
    engine.mark_pushed()
    with engine.averaged():
        assert not engine.changed  # before the first update both are the same
    for step in range(1, 6):
        rates.append(engine.update(_batch(engine, step), flow_matching)["optim/lr"])
        decay = min(DECAY, (1 + step) / (10 + step))  # 2/11, 3/12 = DECAY, …
        for name, weight in sent_weights(engine).items():
            expected[name] = decay * expected[name] + (1 - decay) * weight
    assert rates == [LR / 3, LR * (2 / 3), LR, LR, LR * (1 - 1 / 6)]
    _swap(engine, expected)
    _checkpoint(engine, model, out, backend, rank)


def _swap(engine: Engine, expected: dict[str, Tensor]) -> None:
    trained = sent_weights(engine)
    engine.mark_pushed()
    with engine.averaged():
        assert engine.changed == {"transformer"}
        averaged = sent_weights(engine)
        engine.mark_pushed()
    assert engine.changed == {"transformer"}  # replicas hold the average
    for name, value in expected.items():
        torch.testing.assert_close(averaged[name], value, rtol=1e-5, atol=1e-7)
    assert _differing(trained, averaged)
    assert not _differing(trained, sent_weights(engine))
    with pytest.raises(KeyError), engine.averaged():
        raise KeyError
    assert not _differing(trained, sent_weights(engine))
    with engine.averaged():
        assert not _differing(averaged, sent_weights(engine))


def _checkpoint(engine: Engine, model: Path, out: Path, backend: str, rank: int) -> None:
    """The average goes on where it was, with its decay and the schedule; a run without one does not
    take it, nor lose it.
    """
    engine.save(out / "with")
    dist.barrier()
    resumed = _engine(model, backend, decay=DECAY, rank=rank)
    resumed.load(out / "with")
    for each in (engine, resumed):
        assert each.update(_batch(each, 6), flow_matching)["optim/lr"] == LR * (1 - 2 / 6)
    with engine.averaged(), resumed.averaged():
        assert not _differing(sent_weights(engine), sent_weights(resumed))

    plain = _engine(model, backend, decay=0.0, rank=rank)
    before = sent_weights(plain)
    with plain.averaged():
        assert not _differing(before, sent_weights(plain))
    with pytest.raises(ValueError, match="with has averaged weights, but algorithm.ema_decay=0.0"):
        plain.load(out / "with")
    plain.save(out / "without")
    dist.barrier()
    with pytest.raises(
        ValueError, match=f"without has no averaged weights, but algorithm.ema_decay={DECAY}"
    ):
        resumed.load(out / "without")


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name in first if not torch.equal(first[name], second[name])]


def _engine(model: Path, backend: str, *, decay: float, rank: int) -> Engine:
    config = Config()
    config.lora.rank = rank
    config.engine.backend = backend
    config.model.path, config.model.dtype, config.engine.dtype = str(model), "float32", "float32"
    config.optim.lr, config.optim.warmup_steps, config.algorithm.ema_decay = LR, WARMUP_STEPS, decay
    config.optim.schedule, config.train.num_steps = "linear", NUM_STEPS
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=world_size)
    return build_engine(config, init_mesh(layout, "cpu"), QwenImageAdapter(model))


def _batch(engine: Engine, step: int) -> FlowBatch:
    """Two samples on each rank."""
    generator = torch.Generator().manual_seed(100 * step + engine.mesh.dp_rank)
    shape = (2, *engine.adapter.latents_shape(SAMPLING))
    return FlowBatch(
        latents_NLC=torch.randn(shape, generator=generator),
        noise_NLC=torch.randn(shape, generator=generator),
        sigma_N=torch.rand(2, generator=generator),
        advantages_N=torch.ones(2),
        weights_N=torch.ones(2),
        group_index_N=torch.tensor([0, 1]),
        conditioning={
            "prompt_embeds": torch.randn(2, 5, 64, generator=generator),
            "prompt_mask": torch.arange(5) < torch.tensor([[5], [3]]),
        },
        sampling=SAMPLING,
        denominator=2.0 * engine.mesh.dp,
    )
