"""Tell what a run would do: schedule, window, batch arithmetic, layout, resolved config."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import yaml

from megadiff.algorithms import build_algorithm
from megadiff.config.load import to_dict
from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.mesh import Layout
from megadiff.process.words import counted
from megadiff.train.components import describe_components
from megadiff.train.replicas import replicas_per_node
from megadiff.train.rows import rows_per_group, train_sampling
from megadiff.train.sampling import sampling_of
from megadiff.types import JsonObject


def describe(
    config: Config,
    layout: Layout,
    adapter: ModelAdapter,
    *,
    num_prompts: int,
    ranks_per_node: int,
) -> JsonObject:
    """Return the plan of a run as JSON values: sigmas, components, batches, layout, nodes, config.

    Microbatches are counted as if every group had a signal.
    """
    sampling = sampling_of(config.rollout)
    train = config.train
    algorithm = build_algorithm(config.algorithm)
    tokens, channels = adapter.latents_shape(train_sampling(config, algorithm))

    samples = train.prompts_per_step * config.algorithm.group_size
    rank_prompts = train.prompts_per_step // layout.dp
    update_rows = rank_prompts * rows_per_group(config, algorithm) // train.updates_per_step

    return {
        # float32 has six digits
        "sigmas": [round(float(sigma), 6) for sigma in adapter.schedule(sampling)],
        "sde_window_size": sampling.sde_window_size,
        "sde_window_range": list(sampling.sde_window_range),
        "components": describe_components(config, adapter),
        "num_prompts": num_prompts,
        "prompts_per_step": train.prompts_per_step,
        "samples_per_step": samples,
        "samples_per_step_and_rank": samples // layout.dp,
        "samples_per_update": samples // train.updates_per_step,
        "microbatches_per_update_and_rank": math.ceil(update_rows / train.microbatch_size),
        "samples_total": samples * train.num_steps,
        "latents_shape": [tokens, channels],
        "layout": asdict(layout),
        "nodes": node_lines(config, world_size=layout.world_size, ranks_per_node=ranks_per_node),
        "config": to_dict(config),
    }


def node_lines(config: Config, *, world_size: int, ranks_per_node: int) -> list[str]:
    """Say who starts what where, a line a node, as train/replicas.py does it."""
    rollout = config.rollout
    num_nodes = max(1, world_size // ranks_per_node)
    num_ranks = min(world_size, ranks_per_node)
    is_sampled = build_algorithm(config.algorithm).on_policy or bool(config.eval.every)
    is_colocated = is_sampled and rollout.mode == "colocated"

    # `auto` may be planned on a machine without GPUs
    on_gpus = config.run.device != "cpu"
    per_node = replicas_per_node(config, num_nodes=num_nodes, num_ranks=num_ranks, on_gpus=on_gpus)
    lines = []

    for first in range(0, num_nodes * num_ranks, num_ranks):
        line = f"node {first // num_ranks}: torchrun starts ranks {first}-{first + num_ranks - 1}"
        if is_colocated:
            replicas = counted(per_node, "replica")
            line += f"; rank {first} starts {replicas} (rollout.tp={rollout.tp})"
        lines.append(line)

    if is_sampled and not is_colocated:
        # all ranks share them, so that all GPUs count where the config leaves the number open
        count = replicas_per_node(config, num_nodes=1, num_ranks=world_size, on_gpus=on_gpus)
        replicas = counted(count, "replica")
        lines.append(
            f"other nodes: you start {replicas} (rollout.tp={rollout.tp}): "
            "launch/serve.sh N, then this command's configs and settings"
        )

    return lines


def to_text(plan: JsonObject, *, as_json: bool) -> str:
    """Return one JSON object, or text with the stochastic window marked in the schedule."""
    if as_json:
        return json.dumps(plan) + "\n"
    # the schedule as a table, since a window's place in it is what a user gets wrong
    low, high = plan["sde_window_range"] if plan["sde_window_size"] else (0, 0)
    lines = ["step  sigma     sigma_next  (* = may be stochastic)"]
    sigmas: list[float] = plan["sigmas"]

    for index, (sigma, sigma_next) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        lines.append(
            f"{index:4d}{'*' if low <= index < high else ' '} {sigma:.6f}  {sigma_next:.6f}"
        )

    ranks = counted(plan["layout"]["world_size"], "rank")
    rest = {key: value for key, value in plan.items() if key not in ("sigmas", "config")}
    return "\n".join(
        [
            *lines,
            "",
            yaml.safe_dump(rest, sort_keys=False),
            yaml.safe_dump({"config": plan["config"]}),
            f"ok: all checks passed for {ranks}; nothing was started\n",
        ]
    )
