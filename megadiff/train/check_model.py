"""Check a config against the model's config files and the nodes: what `megadiff plan` asks, too."""

from __future__ import annotations

from pathlib import Path

from megadiff.config.schema import Config
from megadiff.engines.fp8 import check_fp8_fits
from megadiff.models.adapter import ModelAdapter
from megadiff.rollout.stages import check_stages
from megadiff.train.replicas import check_num_replicas
from megadiff.train.sampling import sampling_of


def check_model(config: Config, adapter: ModelAdapter, *, on_policy: bool) -> None:
    """Raise ValueError where the config does not fit the model. on_policy: of the algorithm."""
    adapter.check_trained()
    if adapter.supervised_obstacle and not on_policy:
        raise ValueError(
            f"algorithm.name={config.algorithm.name} with {adapter.title}: "
            f"{adapter.supervised_obstacle}; train it by RL, e.g. with algorithm.name=flow_grpo"
        )
    adapter.validate(sampling_of(config.rollout))
    if config.model.float32_streams:
        adapter.check_float32_streams()
    check_fp8_fits(config, adapter)


def check_replicas(config: Config, adapter: ModelAdapter, *, num_nodes: int) -> None:
    """Raise ValueError where no replica, or none on some node, could run as the config says."""
    check_num_replicas(config, num_nodes=num_nodes)
    rollout = config.rollout
    if rollout.stage_config:
        check_stages(
            Path(rollout.stage_config),
            adapter,
            tp=rollout.tp,
            # a run's own replica sees its own GPUs alone; others' are counted where they start
            num_devices=rollout.tp if rollout.mode == "colocated" else None,
        )

    # replicas split the same heads as the trainer, by a size of their own
    if adapter.num_heads % rollout.tp:
        raise ValueError(
            f"rollout.tp={rollout.tp} does not divide the model's {adapter.num_heads} "
            f"attention heads; set rollout.tp to a divisor of {adapter.num_heads}"
        )
