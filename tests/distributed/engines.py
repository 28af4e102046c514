"""What the engine tests share: a batch whose lengths divide by nothing, engines of a tiny model,
and plain diffusers' answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from megadiff.algorithms.flow_grpo import flow_grpo
from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.engines import build_engine
from megadiff.engines.engine import Engine
from megadiff.engines.gathering import local
from megadiff.engines.microbatch import loss_inputs, microbatches
from megadiff.engines.sharded import ShardedEngine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.qwen_image.adapter import QwenImageAdapter
from megadiff.parallel.mesh import Layout, init_mesh, resolve_layout
from megadiff.tensors.shards import Shard, ShardFolder
from megadiff.tensors.snapshot import Snapshot
from megadiff.types import Prompt, RolloutGroup, Sampling, TrainBatch

# 3×3 latent tokens and 5, 7, 4 text tokens: neither length divides by sp=2
SAMPLING = Sampling(height=48, width=48, num_inference_steps=6, sde_window_range=(0, 5))
LOSS = partial(flow_grpo, clip_range=(100.0, 100.0), adv_clip_max=5.0, kl_coef=0.0)


def build(
    tiny_model: Path,
    sizes: Mapping[str, int],
    *,
    backend: str,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1e9,
    dtype: str = "float32",
    microbatch_size: int = 7,  # neither the 16 pairs of a batch nor any rank's share is a multiple
    keep_reference: bool = False,
    average_decay: float = 0.0,
    lora: tuple[int, float] = (0, 0.0),
    lora_targets: tuple[str, ...] = (),
    lora_start: Path | str = "",
    shared_base: str = "auto",
    budget: float = 0.5,
    compiled: bool = False,
    fp8: str = "none",
    float32_streams: bool = False,
    device: str = "cpu",
    offload: str = "auto",
    adapter: ModelAdapter | None = None,
    components: tuple[str, ...] = (),
    balance: str = "share",
    algorithm: AlgorithmConfig | None = None,
) -> Engine:
    """An engine of this rank.

    sizes: of the axes, and sequence_parallel (by default on). lora: rank and alpha. adapter: of
    another family than Qwen-Image. components: those that are trained, all by default. algorithm:
    in place of keep_reference and average_decay.
    """
    from megatron.core import distributed

    # the default puts all of a small model into one bucket, 20 B are hundreds
    distributed.DistributedDataParallelConfig = partial(
        distributed.DistributedDataParallelConfig, bucket_size=50_000
    )
    config = Config()
    config.model.path, config.model.dtype = str(tiny_model), "float32"
    config.model.float32_streams = float32_streams
    config.engine.backend, config.engine.dtype = backend, dtype
    config.engine.activation_memory_budget = budget
    config.engine.compile = compiled
    config.engine.fp8 = fp8
    config.engine.offload = offload
    config.optim.lr, config.optim.weight_decay, config.optim.max_grad_norm = (
        lr,
        weight_decay,
        max_grad_norm,
    )
    config.lora.rank, config.lora.alpha = lora
    config.lora.targets, config.lora.start = list(lora_targets), str(lora_start)
    config.lora.shared_base = shared_base
    config.parallel.sequence_parallel = bool(sizes.get("sequence_parallel", True))
    config.train.microbatch_size = microbatch_size
    config.train.components, config.train.component_weighting = list(components), balance
    config.algorithm.kl_coef, config.algorithm.ema_decay = float(keep_reference), average_decay
    config.algorithm = algorithm or config.algorithm
    return build_engine(
        config, init_mesh(layout_of(sizes), device), adapter or QwenImageAdapter(tiny_model)
    )


def only(engine: Engine) -> ShardedEngine:
    """What is inside the engine of a model with one component."""
    (member,) = engine.members.values()
    return member


def layout_of(sizes: Mapping[str, int]) -> Layout:
    """Of the world that run_ranks started."""
    axes = {"dp": 0, "sp": 1, "tp": 1, "dp_replicate": 1} | dict(sizes)
    axes.pop("sequence_parallel", None)
    return resolve_layout(**axes, world_size=int(os.environ.get("WORLD_SIZE", "1")))


def train_batch(
    adapter: ModelAdapter, scale: float = 1.0, dp: int = 1, dp_rank: int = 0, *, text_dim: int = 64
) -> TrainBatch:
    """This rank's part of 4 groups of 2 samples that differ in window start, prompt width,
    advantage and weight.
    """
    generator = torch.Generator().manual_seed(7)
    num_tokens, channels = adapter.latents_shape(SAMPLING)
    widths_P = torch.tensor([5, 7, 4, 7])
    conditioning = {
        "prompt_embeds": torch.randn(4, 7, text_dim, generator=generator),
        "prompt_mask": torch.arange(7) < widths_P[:, None],
        "negative_prompt_embeds": torch.randn(4, 7, text_dim, generator=generator),
        "negative_prompt_mask": torch.arange(7) < torch.tensor([3, 3, 3, 7])[:, None],
    }
    groups_N, mine_N = torch.arange(8) // 2, slice(8 // dp * dp_rank, 8 // dp * (dp_rank + 1))
    mine_P = slice(4 // dp * dp_rank, 4 // dp * (dp_rank + 1))
    weights_N = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    return TrainBatch(
        latents_NSLC=torch.randn(8, 3, num_tokens, channels, generator=generator)[mine_N],
        old_log_probs_NW=torch.full((8, 2), -3.0)[mine_N],
        window_start_N=torch.tensor([0, 3, 1, 2])[groups_N][mine_N],
        trained_steps_NK=torch.arange(2).repeat(8, 1)[mine_N],
        advantages_N=torch.randn(8, generator=generator)[mine_N],
        weights_N=weights_N[mine_N],
        group_index_N=groups_N[mine_N] - groups_N[mine_N][0],
        conditioning={name: value_P[mine_P] for name, value_P in conditioning.items()},
        schedule=adapter.schedule(SAMPLING),
        sampling=replace(SAMPLING, true_cfg_scale=scale),
        denominator=12.0,
    )


def mine(engine: Engine, scale: float = 1.0) -> TrainBatch:
    """The engine's part of the batch."""
    return train_batch(engine.adapter, scale, engine.mesh.dp, engine.mesh.dp_rank)


def group_of(batch: TrainBatch, index: int, log_probs_NW: Tensor) -> RolloutGroup:
    """The group that the batch has at this index, as it came from a replica that recorded these
    log_probs.
    """
    prompt = Prompt(text=f"prompt {index}", id=f"{index:016x}")
    rows_G = torch.nonzero(batch.group_index_N == index)[:, 0]
    return RolloutGroup(
        prompt=prompt,
        sampling=batch.sampling,
        sample_indices=tuple(range(len(rows_G))),
        window_start=int(batch.window_start_N[rows_G[0]]),
        latents_GSLC=batch.latents_NSLC[rows_G],
        log_probs_GW=log_probs_NW[rows_G],
        pixels_GFHWC=torch.empty(len(rows_G), 0, dtype=torch.uint8),
        schedule=batch.schedule,
        conditioning={
            name: value_P[index : index + 1] for name, value_P in batch.conditioning.items()
        },
        policy_version=0,
        replica="replica_0",
    )


@contextmanager
def forwards(engine: Engine) -> Iterator[dict[bool, list[int]]]:
    """Rows of each forward, by whether it has a gradient."""
    counted: dict[bool, list[int]] = {True: [], False: []}
    velocity = engine.adapter.velocity

    def counting(transformer: Any, latents_BLC: Tensor, *rest: Any, **named: Any) -> Tensor:
        counted[torch.is_grad_enabled()].append(len(latents_BLC))
        return velocity(transformer, latents_BLC, *rest, **named)

    with patch.object(engine.adapter, "velocity", counting):
        yield counted


def at_step(batch: TrainBatch, step: int) -> TrainBatch:
    """Another batch at every step, and a gradient that is large and small in turn."""
    return replace(
        batch,
        latents_NSLC=batch.latents_NSLC * (1 + 0.05 * step),
        denominator=batch.denominator * (4.0 if step % 2 else 1.0),
    )


def stock_transformer(tiny_model: Path, **options: object) -> QwenImageTransformer2DModel:
    """Plain diffusers, in a process where VeOmni has not replaced its forward."""
    assert QwenImageTransformer2DModel.forward.__wrapped__.__module__.startswith("diffusers."), (
        "VeOmni got in here"
    )
    return QwenImageTransformer2DModel.from_pretrained(tiny_model / "transformer", **options)


def stock_backward(
    transformer: nn.Module, adapter: QwenImageAdapter, batch: TrainBatch
) -> dict[str, Tensor]:
    """Gradients of the whole batch in one piece, left on the parameters; returns the loss's
    figures.
    """
    (piece,) = microbatches(batch, torch.arange(batch.num_rows), 1000, torch.device("cpu"))
    velocity_BLC = adapter.velocity(
        transformer, piece.latents_BLC, piece.sigma_B, piece.conditioning, batch.sampling
    )
    output = LOSS(loss_inputs(batch, piece, velocity_BLC))
    (output.loss_sum / batch.denominator).backward()
    return {
        name: (value / batch.denominator).detach().float() for name, value in output.sums.items()
    }


def stock_gradients(tiny_model: Path, scale: float) -> dict[str, Tensor]:
    """Name → gradient by stock diffusers, and what an engine's update() with lr=0 returns."""
    transformer, adapter = stock_transformer(tiny_model), QwenImageAdapter(tiny_model)
    figures = stock_backward(transformer, adapter, train_batch(adapter, scale))
    gradients = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    return gradients | figures | {"optim/grad_norm": norm, "optim/lr": torch.tensor(0.0)}


def gradient_shards(engine: ShardedEngine) -> dict[str, list[Shard]]:
    """This rank's pieces of the reduced gradients, each on its first holder only; for a
    Snapshot.
    """
    held = {
        name: local(held.grad) for name, held in engine._optimized.items() if held.grad is not None
    }
    gradients = {name: gradient for name, gradient in held.items() if engine._is_first_holder(name)}
    return {name: engine._shards(name, gradient.clone()) for name, gradient in gradients.items()}


def write_gradients(engine: Engine, batch: TrainBatch, folder: Path) -> None:
    """Write the reduced gradients and the figures of an update of a model of one component."""
    captured: dict[str, list[Shard]] = {}
    hook = only(engine).optimizer.register_step_pre_hook(
        lambda *_: captured.update(gradient_shards(only(engine)))
    )
    figures = engine.update(batch, LOSS)
    hook.remove()
    mesh = engine.mesh
    snapshot = Snapshot(shards=captured, rank=mesh.rank, num_files=mesh.world_size, values=figures)
    snapshot.write(folder)


def updates(engine: Engine, first: int, stop: int) -> Iterator[dict[str, float]]:
    """In several microbatches and in one by turns: gradients are reduced after the last, whichever
    it is.
    """
    for step in range(first, stop):
        engine.config.train.microbatch_size = (7, 16)[step % 2]
        yield engine.update(at_step(mine(engine), step), LOSS)


def sent_weights(engine: Engine, components: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return a copy of what a push sends: LoRA's tensors, or else the weights."""
    named = engine.named_lora if engine.lora else engine.named_weights
    buckets = named(1 << 20, components)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def whole(folder: ShardFolder, name: str) -> Tensor:
    """The full tensor that a checkpoint holds."""
    shape = folder.shapes[name]
    shard = Shard(local=torch.empty(shape), offsets=(0,) * len(shape), shape=shape)
    folder.read_into(name, shard)
    return shard.local


def differing(first: Path, second: Path) -> list[str]:
    """Names of tensors, weights and moments alike, that differ in any bit between two
    checkpoints.
    """
    one, other = ShardFolder(first), ShardFolder(second)
    assert one.shapes == other.shapes and one.values == other.values
    return [name for name in one.shapes if not torch.equal(whole(one, name), whole(other, name))]
