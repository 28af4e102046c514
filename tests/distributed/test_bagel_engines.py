"""BAGEL in both engines, under every way to split it: gradients, frozen weights, what is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.models.bagel.adapter import BagelAdapter
from megadiff.tensors.shards import ShardFolder
from megadiff.types import TrainBatch
from tests.distributed.engines import (
    build,
    only,
    sent_weights,
    stock_backward,
    train_batch,
    whole,
    write_gradients,
)
from tests.distributed.ranks import run_ranks
from tests.plain_module import plain_module

# More layouts of the module alone are in test_family_layouts.
LAYOUTS = {
    "veomni_dp2": (2, "veomni", {}),
    "veomni_sp2": (2, "veomni", {"sp": 2}),
    "megatron_tp2": (2, "megatron", {"tp": 2}),
    "megatron_sp2": (2, "megatron", {"sp": 2}),
}


def bagel_batch(adapter: BagelAdapter, dp: int = 1, dp_rank: int = 0) -> TrainBatch:
    """A rank's part of train_batch, with prompts of several lengths and one blank negative text."""
    batch = train_batch(adapter, 1.0, dp, dp_rank)
    generator = torch.Generator().manual_seed(5)
    conditioning = {}
    for prefix, lengths in (("", (7, 9, 6, 8)), ("negative_", (2, 2, 5, 2))):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.randint(0, 256, mask.shape, generator=generator)
        conditioning |= {f"{prefix}prompt_ids": ids, f"{prefix}prompt_mask": mask}
    groups = slice(4 // dp * dp_rank, 4 // dp * (dp_rank + 1))
    return replace(
        batch,
        conditioning={name: value[groups] for name, value in conditioning.items()},
        sampling=replace(batch.sampling, true_cfg_scale=1.0, guidance_scale=4.0),
    )


@pytest.fixture(scope="module")
def alone(tiny_bagel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the module answers without an engine, and its gradients."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(_alone, 1, tiny_bagel, folder)
    return load_file(folder / "reference.safetensors")


def _alone(folder: Path, out: Path) -> None:
    adapter = BagelAdapter(folder)
    module = plain_module(adapter)
    batch = bagel_batch(adapter)
    stock_backward(module, adapter, batch)
    results = {
        f"gradient/{name}": p.grad for name, p in module.named_parameters() if p.grad is not None
    }
    save_file(results, out / "reference.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_is_the_same_under_every_layout(
    layout: str, tiny_bagel: Path, alone: dict[str, Tensor], tmp_path: Path
) -> None:
    """Every trained weight's gradient is the plain module's; frozen weights stay bit for bit."""
    world_size, backend, sizes = LAYOUTS[layout]
    run_ranks(_update, world_size, tiny_bagel, tmp_path, backend, sizes)
    gradients = ShardFolder(tmp_path / "gradients")
    assert {f"gradient/{name}" for name in gradients.shapes} == alone.keys()
    floor = 1e-4 * max(float(value.abs().max()) for value in alone.values())
    for name in gradients.shapes:
        expected = alone[f"gradient/{name}"]
        error = float((whole(gradients, name) - expected).abs().max())
        assert error <= 5e-6 * max(float(expected.abs().max()), floor), f"{name}: {error}"


def _update(folder: Path, out: Path, backend: str, sizes: dict[str, int]) -> None:
    engine = build(folder, sizes, backend=backend, adapter=BagelAdapter(folder))
    member = only(engine)
    batch = bagel_batch(engine.adapter, engine.mesh.dp, engine.mesh.dp_rank)
    before = sent_weights(engine)

    write_gradients(engine, batch, out / "gradients")
    after = sent_weights(engine)
    frozen = {name for name in before if name.startswith("transformer~frozen.")}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == before.keys() - frozen
    # neither masters nor a checkpoint, and no later push, has what is frozen
    assert not {f"transformer~frozen.{name}" for name in member._masters} & frozen
    assert not any("mlp.gate_proj" in name for name in member.shards())
    assert sent_weights(engine, ["transformer"]).keys() == moved
    assert sent_weights(engine, ["transformer~frozen"]).keys() == frozen
