"""Layouts of both engines, and an engine with a LoRA in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megadiff.engines.engine import Engine
from tests.distributed.engines import build

RANK, ALPHA = 3, 7.5  # divides nothing, and a scale that is neither 1 nor a power of two
LR = 5e-3
WHOLE_TOKENS = {"sequence_parallel": False}
LAYOUTS = {  # engine, world size, sizes of the axes, budget
    "veomni_dp1": ("veomni", 1, {}, 1.0),
    "veomni_dp2": ("veomni", 2, {}, 0.5),
    "veomni_sp2": ("veomni", 2, {"sp": 2}, 0.5),
    "veomni_hsdp2": ("veomni", 2, {"dp_replicate": 2}, 1.0),
    "veomni_dp1_sharded": ("veomni", 1, {}, 1.0),
    "veomni_dp2_sharded": ("veomni", 2, {}, 0.5),
    "veomni_sp2_sharded": ("veomni", 2, {"sp": 2}, 0.5),
    "megatron_tp1": ("megatron", 1, {}, 0.5),
    "megatron_tp2_whole_tokens": ("megatron", 2, {"tp": 2, **WHOLE_TOKENS}, 0.5),
    "megatron_tp2": ("megatron", 2, {"tp": 2}, 1.0),
    "megatron_tp2_dp2": ("megatron", 4, {"tp": 2}, 0.5),
    "megatron_tp4": ("megatron", 4, {"tp": 4}, 1.0),
    "megatron_tp2_sp2": ("megatron", 4, {"tp": 2, "sp": 2}, 0.5),
}


def named_tensors(buckets: Iterator[list[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    return dict(pair for bucket in buckets for pair in bucket)


def lora_engine(tiny_model: Path, layout: str, **options: object) -> Engine:
    backend, _, sizes, budget = LAYOUTS[layout]
    return build(
        tiny_model,
        sizes,
        backend=backend,
        budget=budget,
        lora=(RANK, ALPHA),
        shared_base="never" if layout.endswith("_sharded") else "auto",
        **options,
    )
