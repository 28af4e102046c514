"""A LoRA of some modules begins with a file's values, in both engines, and resumes without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megadiff.config.schema import LoraConfig as LoraKeys
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.models.qwen_image.plan import PLAN
from megadiff.parallel.lora import lora_shapes, lora_spec
from megadiff.tensors.lora_files import DIFFUSERS_WEIGHTS
from megadiff.train.log_probs import log_probs
from tests.distributed.engines import LOSS, mine
from tests.distributed.lora_layouts import ALPHA, LAYOUTS, LR, RANK, lora_engine, named_tensors
from tests.distributed.ranks import run_ranks
from tests.lora_tensors import write_lora

TARGETS = ("to_q", "attn.add_k_proj", "img_mlp.net.2")


@pytest.mark.parametrize("layout", ["veomni_dp2", "veomni_sp2", "megatron_tp1", "megatron_tp2"])
def test_some_modules_from_a_file(layout, tiny_model, tmp_path):
    """The policy of step 0 is that of the file, whole on every rank; only its modules are trained,
    and a resumed run goes on where it was, without the file's values.
    """
    base = {
        name: tuple(p.shape)
        for name, p in QwenImageAdapter(tiny_model).empty_transformer().named_parameters()
    }
    keys = LoraKeys(rank=RANK, alpha=ALPHA, targets=list(TARGETS))
    spec = lora_spec(keys, PLAN, base)
    write_lora(tmp_path / "lora", spec, lora_shapes(spec, base))
    _, world_size, _, _ = LAYOUTS[layout]
    run_ranks(_start_worker, world_size, tiny_model, tmp_path, layout)


def _start_worker(tiny_model: Path, out: Path, layout: str) -> None:
    options = {"lora_targets": TARGETS, "lora_start": out / "lora", "lr": LR}
    engine = lora_engine(tiny_model, layout, **options)
    stored = load_file(out / "lora" / DIFFUSERS_WEIGHTS)
    served = named_tensors(engine.named_lora(10_000))
    assert served.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in served.items())
    policy = log_probs(engine, mine(engine))
    with engine.reference():
        reference = log_probs(engine, mine(engine))
    assert (policy.log_probs_NW - reference.log_probs_NW).abs().max() > 1e-3

    fresh = lora_engine(tiny_model, layout, lora_targets=TARGETS, lr=LR)
    assert fresh.lora == engine.lora
    engine.save(out / "checkpoint")
    dist.barrier()
    fresh.load(out / "checkpoint")
    assert torch.equal(log_probs(fresh, mine(engine)).log_probs_NW, policy.log_probs_NW)

    figures = [each.update(mine(each), LOSS) for each in (engine, fresh)]
    assert figures[0] == figures[1] and figures[0]["optim/grad_norm"] > 0
    moved = named_tensors(engine.named_lora(10_000))
    assert moved.keys() == stored.keys()
    assert not any(torch.equal(tensor, stored[name]) for name, tensor in moved.items())

    engine.save(out / "later")
    dist.barrier()
    resumed = lora_engine(tiny_model, layout, **options)
    resumed.load(out / "later")
    figures = [each.update(mine(each), LOSS) for each in (engine, resumed)]
    assert figures[0] == figures[1]
