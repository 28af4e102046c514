"""Where trainer and replicas hold LoRA's base once, and how its parameters pass FSDP2 by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megadiff.config.schema import Config
from megadiff.engines.shared_base import WithheldBase, base_obstacle, build_base, shares_base
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.parallel.lora import Adapters, adapt_linears
from megadiff.parallel.plan import is_lora
from megadiff.types import LoraSpec

GPUS = {"device_type": "cuda", "world_size": 4}


def config_with(**keys: object) -> Config:
    config = Config()
    config.lora.rank = 4
    for key, value in keys.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return config


@pytest.fixture
def adapter(tiny_model: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_model)


def test_lora_on_colocated_gpus_shares(adapter) -> None:
    assert shares_base(config_with(), adapter, **GPUS)
    assert shares_base(config_with(rollout__num_replicas=4), adapter, **GPUS)
    assert shares_base(config_with(rollout__fp8=True), adapter, **GPUS)
    assert shares_base(config_with(sync__transport="shm", parallel__sp=2), adapter, **GPUS)
    on_cpu = config_with(sync__transport="http", rollout__num_replicas=1)
    assert shares_base(on_cpu, adapter, device_type="cpu", world_size=2)
    assert not shares_base(config_with(lora__rank=0), adapter, **GPUS)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"lora__shared_base": "never"}, "lora.shared_base=never"),
        ({"engine__backend": "megatron"}, "engine.backend=megatron"),
        ({"rollout__mode": "separate"}, "rollout.mode=separate"),
        ({"algorithm__name": "sft"}, "nothing samples"),
        ({"rollout__tp": 2}, "rollout.tp=2"),
        ({"engine__dtype": "float32"}, "engine.dtype=float32 is not model.dtype=bfloat16"),
        ({"sync__transport": "disk"}, "sync.transport=disk"),
        ({"sync__transport": "http"}, "sync.transport=http"),
        ({"rollout__num_replicas": 2}, "rollout.num_replicas=2 on 4 GPUs"),
    ],
)
def test_what_else_keeps_them_apart(keys, reason, adapter) -> None:
    config = config_with(**keys)
    assert base_obstacle(config, adapter, **GPUS).startswith(reason)
    assert not shares_base(config, adapter, **GPUS)


def test_families_that_do_not_share(adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenImageAdapter, "served_names", None)
    assert "does not say how replicas pack" in base_obstacle(config_with(), adapter, **GPUS)
    adapter.components = ("transformer", "transformer_2")
    assert "the model has 2 components" in base_obstacle(config_with(), adapter, **GPUS)


def test_a_withheld_base_comes_back_in_its_order(adapter) -> None:
    model = adapter.empty_transformer()
    names = [name for name, _ in model.named_parameters()]
    modules = adapter.plan.lora_modules(names)
    adapt_linears(model, Adapters(LoraSpec(rank=2, alpha=2.0, modules=modules)))
    names = [name for name, _ in model.named_parameters()]
    withheld = WithheldBase(model)
    assert [name for name, _ in model.named_parameters()] == list(filter(is_lora, names))

    base = build_base(withheld, adapter, dtype=torch.float32, device=torch.device("cpu"))
    withheld.put_back(model, base)
    parameters = dict(model.named_parameters())
    assert list(parameters) == names
    for name, tensor in base.tensors.items():
        assert parameters[name].data_ptr() == tensor.data_ptr()
        assert not parameters[name].requires_grad
    block = model.get_submodule(adapter.plan.block_lists[0])[0]
    q, k = block.attn.to_q.weight, block.attn.to_k.weight
    assert k.data_ptr() == q.data_ptr() + q.nbytes  # rows of what the replica fuses
    assert isinstance(q, nn.Parameter)
