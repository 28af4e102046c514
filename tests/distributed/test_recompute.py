"""Which blocks compute their activations a second time changes no gradient: both engines and
families, sp, LoRA, compiled blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megadiff.engines.engine import Engine
from megadiff.engines.gathering import local
from megadiff.engines.microbatch import cut_rows
from megadiff.models.registry import build_adapter
from tests.distributed.engines import LOSS, build, only, train_batch
from tests.distributed.ranks import run_ranks
from tests.extra import cases

LORA = (4, 6.0)
CASES = {  # backend, family, world size, sizes of the axes, what else the engine is built with
    "veomni_sp2": ("veomni", "qwen_image", 2, {"sp": 2}, {}),
    "veomni_lora_compiled": ("veomni", "qwen_image", 1, {}, {"lora": LORA, "compiled": True}),
    "wan_veomni_sp2": ("veomni", "wan", 2, {"sp": 2}, {}),
    "wan_veomni_compiled": ("veomni", "wan", 1, {}, {"compiled": True}),
    "megatron_tp2": ("megatron", "qwen_image", 2, {"tp": 2}, {}),
    "megatron_tp2_compiled": ("megatron", "qwen_image", 2, {"tp": 2}, {"compiled": True}),
    "megatron_lora_compiled": (
        "megatron",
        "qwen_image",
        2,
        {"tp": 2},
        {"lora": LORA, "compiled": True},
    ),
}
# what Megatron compiles is in test_megatron_compiled.py
COMPILED_MEGATRON = ("megatron_tp2_compiled", "megatron_lora_compiled")
MICROBATCH = {
    False: 5,
    True: 8,
}  # of 16 rows; compiled: no remainder, and texts masked in each, so one variant
BUDGETS = {
    0.0: (2, 2),
    0.5: (2, 1),
    1.0: (1, 1),
}  # of activations → forwards of each block, uncompiled


@pytest.mark.parametrize("case", cases(CASES, extra_ones=COMPILED_MEGATRON))
def test_gradients_do_not_depend_on_what_is_recomputed(case, tiny_model, tiny_wan):
    _, family, world_size, _, _ = CASES[case]
    run_ranks(
        _worker, world_size, tiny_model if family == "qwen_image" else tiny_wan["ti2v_5b"], case
    )


def _worker(model: Path, case: str) -> None:
    """By a compiler's backend that leaves arithmetic as it is."""
    backend, _, _, sizes, options = CASES[case]
    is_compiled = "compiled" in options
    size = MICROBATCH[is_compiled]
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")
    gradients, kept = {}, []
    # each budget compiles anew, which takes seconds
    budgets = list(BUDGETS)[:2] if is_compiled and backend == "megatron" else list(BUDGETS)
    for budget in budgets:
        calls = BUDGETS[budget]
        torch._dynamo.reset()
        engine = build(
            model,
            sizes,
            backend=backend,
            adapter=build_adapter(model),
            microbatch_size=size,
            budget=budget,
            **options,
        )
        with _kept_bytes(only(engine).transformer) as num_bytes:
            gradients[budget], counted, num_pieces = _update(engine)
        if not is_compiled:
            assert counted == tuple(each * num_pieces for each in calls), (budget, counted)
        kept.append(sum(num_bytes))
    assert kept == sorted(kept) and kept[0] < kept[-1], kept  # a larger budget keeps more
    for budget, found in gradients.items():
        assert found.keys() == gradients[0.0].keys()
        for name, expected in gradients[0.0].items():
            if is_compiled:
                assert torch.allclose(found[name], expected, rtol=5e-6, atol=1e-9), (budget, name)
            else:
                assert torch.equal(found[name], expected), (budget, name)
    assert max(float(each.abs().max()) for each in gradients[0.0].values() if each.numel()) > 1e-4


@contextmanager
def _kept_bytes(transformer: nn.Module) -> Iterator[list[int]]:
    """Of what autograd keeps meanwhile beside weights, as often as it is kept."""
    sizes: list[int] = []
    weights = {tuple(sorted(parameter.shape)) for parameter in transformer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tuple(sorted(tensor.shape)) not in weights:
            sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def _update(engine: Engine) -> tuple[dict[str, Tensor], tuple[int, ...], int]:
    """(name → this rank's piece of the gradient, forwards of each block, microbatches) of one
    update.
    """
    member, mesh = only(engine), engine.mesh
    gradients: dict[str, Tensor] = {}
    calls: Counter[str] = Counter()
    hook = member.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(
            {n: local(p.grad).clone() for n, p in member._optimized.items() if p.grad is not None}
        )
    )
    blocks = {
        engine.adapter.plan.block_of(n): m
        for n, m in member.transformer.named_modules()
        if engine.adapter.plan.is_block(n)
    }
    hooks = [
        block.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
        for index, block in blocks.items()
    ]
    text_dim = getattr(member.transformer.config, "text_dim", 64)
    batch = train_batch(engine.adapter, 1.0, mesh.dp, mesh.dp_rank, text_dim=text_dim)
    engine.update(batch, LOSS)
    for each in (hook, *hooks):
        each.remove()
    num_pieces = len(
        cut_rows(batch, torch.arange(batch.num_rows), engine.config.train.microbatch_size)
    )
    return gradients, tuple(calls[index] for index in sorted(blocks)), num_pieces
