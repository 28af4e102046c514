"""Hold the planner's figures against what engines allocate, storage by storage, on gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.tiny_models import z_image
from megadiff.config.schema import Config, LoraConfig
from megadiff.engines import build_engine
from megadiff.engines.engine import Engine
from megadiff.models.registry import build_adapter
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.planner import engine_memory
from megadiff.planner.activation_memory import kept_bytes
from megadiff.planner.engine_memory import Placing, static_bytes
from megadiff.planner.work import model_shape
from megadiff.types import DTYPES
from tests.distributed.engines import LOSS, only, train_batch
from tests.distributed.ranks import run_ranks
from tests.extra import cases
from tests.kept_activations import activation_work, kept_by_autograd

# backend, engine.dtype, world size, sizes, sequence parallelism, Megatron's bucket size, lora.rank
QWEN_CASES = {
    "veomni_dp1": ("veomni", "bfloat16", 1, {}, False, 0, 0),
    "veomni_dp2": ("veomni", "float32", 2, {}, False, 0, 0),
    "veomni_dp3": (
        "veomni",
        "bfloat16",
        3,
        {},
        False,
        0,
        0,
    ),  # divides few of the sizes: chunks are padded
    "veomni_sp2": ("veomni", "float32", 2, {"sp": 2}, False, 0, 0),
    "veomni_hsdp2_shard2": ("veomni", "float32", 4, {"dp_replicate": 2}, False, 0, 0),
    "veomni_dp3_lora": (
        "veomni",
        "bfloat16",
        3,
        {},
        False,
        0,
        2,
    ),  # and one rank has nothing of each lora_A
    "veomni_sp2_lora": ("veomni", "float32", 2, {"sp": 2}, False, 0, 8),
    "megatron_tp1": ("megatron", "float32", 1, {}, False, 0, 0),
    "megatron_dp3_buckets": ("megatron", "bfloat16", 3, {}, False, 50_000, 0),
    "megatron_tp2": ("megatron", "bfloat16", 2, {"tp": 2}, False, 0, 0),
    "megatron_tp2_SP": ("megatron", "float32", 2, {"tp": 2}, True, 0, 0),
    "megatron_tp2_dp2_SP": ("megatron", "bfloat16", 4, {"tp": 2}, True, 0, 0),
    "megatron_tp2_dp2_SP_lora": ("megatron", "bfloat16", 4, {"tp": 2}, True, 5_000, 8),
    "megatron_tp2_lora": ("megatron", "float32", 2, {"tp": 2}, False, 0, 2),
    "megatron_sp2_tp2_SP": ("megatron", "float32", 4, {"sp": 2, "tp": 2}, True, 50_000, 0),
}
WAN_CASES = {
    "wan_veomni_sp2": ("veomni", "bfloat16", 2, {"sp": 2}, False, 0, 0),
    "wan_veomni_dp1_lora": ("veomni", "bfloat16", 1, {}, False, 0, 8),
    "wan_megatron_tp2": ("megatron", "float32", 2, {"tp": 2}, False, 0, 0),
    "wan_megatron_sp2_tp2_SP_lora": (
        "megatron",
        "bfloat16",
        4,
        {"sp": 2, "tp": 2},
        True,
        50_000,
        8,
    ),
}
Z_IMAGE_CASES = {
    "z_image_veomni_sp2": ("veomni", "bfloat16", 2, {"sp": 2}, False, 0, 0),
    "z_image_megatron_tp2_SP": ("megatron", "float32", 2, {"tp": 2}, True, 0, 0),
}
CASES = QWEN_CASES | WAN_CASES | Z_IMAGE_CASES
LIKE_OTHERS = (
    "veomni_dp3_lora",
    "megatron_tp2_SP",
    "megatron_tp2_lora",
    "wan_veomni_sp2",
    "z_image_veomni_sp2",
)
AVERAGE_DECAY = 0.9


@pytest.mark.parametrize("case", cases(CASES, extra_ones=LIKE_OTHERS))
def test_plan_is_what_the_engine_allocates(case, tiny_model, tiny_wan, tmp_path, monkeypatch):
    """What stays is equal to the byte, on the fullest rank; what a forward keeps within bounds."""
    backend, dtype, world_size, sizes, sequence_parallel, bucket_size, rank = CASES[case]
    if bucket_size:  # the default puts all of a small model into one bucket
        monkeypatch.setattr(engine_memory, "MEGATRON_BUCKET_SIZE", bucket_size)
        monkeypatch.setattr(engine_memory, "MEGATRON_BUCKET_SIZE_PER_RANK", 0)
    folder = tiny_wan["ti2v_5b"] if case in WAN_CASES else tiny_model
    if case in Z_IMAGE_CASES:
        folder = tmp_path / "z_image"
        z_image.write_tiny_pipeline(folder)
    run_ranks(_measure, world_size, folder, tmp_path, *CASES[case])
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    placing = Placing(
        backend=backend, layout=_layout(world_size, sizes), sequence_parallel=sequence_parallel
    )
    adapter = build_adapter(folder)
    model = model_shape(adapter, LoraConfig(rank=rank))
    shared = ranks[0]["shares base"]
    assert shared == (case == "veomni_sp2_lora"), "of equal dtypes, and a family that shares"
    work = replace(activation_work(adapter, DTYPES[dtype].itemsize), shares_base=shared)
    planned = static_bytes(model, placing, work)
    for part in ("parameters", "gradients", "optimizer", "average", "reference"):
        fullest = max(measured[part] for measured in ranks)
        assert getattr(planned, part) == fullest, part
    assert all(measured["gradients before and after"] == [0, 0] for measured in ranks)
    kept = max(measured["kept"] for measured in ranks)
    assert 0.9 * kept <= kept_bytes(model, placing, work) <= 1.15 * kept


def _measure(
    model: Path,
    out: Path,
    backend: str,
    dtype: str,
    world_size: int,
    sizes: dict[str, int],
    sequence_parallel: bool,
    bucket_size: int,
    rank: int,
) -> None:
    """One update; gradients are looked at when the optimizer reads them, the rest afterwards."""
    if bucket_size:
        from megatron.core import distributed

        distributed.DistributedDataParallelConfig = partial(
            distributed.DistributedDataParallelConfig, bucket_size=bucket_size
        )
    config = Config()
    config.model.path, config.model.dtype = str(model), "float32"
    config.engine.backend, config.engine.dtype = backend, dtype
    config.optim.lr, config.train.microbatch_size = 1e-3, 6
    config.parallel.sequence_parallel, config.engine.activation_memory_budget = (
        sequence_parallel,
        1.0,
    )
    config.lora.rank = rank
    config.algorithm.kl_coef, config.algorithm.ema_decay = 1.0, AVERAGE_DECAY
    engine = build_engine(
        config, init_mesh(_layout(world_size, sizes), "cpu"), build_adapter(model)
    )
    gradients, before = [], _bytes(_gradients(engine))
    only(engine).optimizer.register_step_pre_hook(
        lambda *_: gradients.append(_bytes(_gradients(engine)))
    )
    dp = engine.mesh.dp if 4 % engine.mesh.dp == 0 else 1
    text_dim = getattr(only(engine).transformer.config, "text_dim", 64)
    engine.update(
        train_batch(engine.adapter, 1.0, dp, engine.mesh.dp_rank % dp, text_dim=text_dim), LOSS
    )
    parameters = list(_plain(only(engine).transformer.parameters()))
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    state = [
        value for state in only(engine).optimizer.state.values() for value in _plain(state.values())
    ]
    held = [
        tensor
        for tensor in _plain(only(engine)._optimized.values())
        if tensor.untyped_storage().data_ptr() not in weights
    ]
    measured = {
        "parameters": _bytes(parameters),
        "gradients": gradients[0],
        "optimizer": _bytes([*state, *held]),
        "average": _bytes(_plain(only(engine)._average.values()), on_host=_host_pieces(engine)),
        "reference": sum(tensor.nbytes for tensor in (only(engine)._reference or {}).values()),
        "kept": kept_by_autograd(engine.adapter, only(engine).transformer),
        "shares base": engine.shared_base is not None,
        "gradients before and after": [before, _bytes(_gradients(engine))],
    }
    (out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(measured))


def _gradients(engine: Engine) -> list[Tensor]:
    parameters = list(only(engine).transformer.parameters())
    found = [p.main_grad for p in parameters if hasattr(p, "main_grad")]
    return found + list(_plain(p.grad for p in parameters if p.grad is not None))


def _host_pieces(engine: Engine) -> int:
    """Sum averages that are on the host even on GPUs: of frozen weights under bfloat16."""
    if engine.config.engine.backend == "veomni" or engine.config.engine.dtype == "float32":
        return 0
    return sum(
        average.nbytes
        for name, average in only(engine)._average.items()
        if name not in only(engine)._optimized
    )


def _plain(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    with torch.no_grad():
        for tensor in tensors:
            yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors: Iterable[Tensor], *, on_host: int = 0) -> int:
    """Of the distinct storages, whole: padding and what else is in a buffer count."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values()) - on_host


def _layout(world_size: int, sizes: dict[str, int]):
    return resolve_layout(
        **{"dp": 0, "sp": 1, "tp": 1, "dp_replicate": 1, **sizes}, world_size=world_size
    )
