"""Check before step 1 that trainer and replicas compute the same policy: the parity gate.

The trainer asks each replica for two calls (megadiff.train.probe), recomputes what it sampled, and
compares every group of both.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megadiff.algorithms import build_algorithm
from megadiff.config.algorithm import half_clip_range
from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.diffusion import noise, sde
from megadiff.engines.engine import Engine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.conditioning import NEGATIVE
from megadiff.parallel.collectives import agreed, all_reduce_max, raise_together
from megadiff.process.words import counted
from megadiff.rollout.client.fleet import Fleet
from megadiff.train.components import component_steps
from megadiff.train.log_probs import log_probs
from megadiff.train.probe import Call, at_largest_weight
from megadiff.train.rows import to_train_batch
from megadiff.train.run_replicas import RunReplicas
from megadiff.train.sampling import broadcast_groups, for_replica, group_requests, sampling_of
from megadiff.types import (
    LOG_PROB_ROUNDING,
    Figures,
    PromptBatch,
    RolloutGroup,
    Sampling,
    TrainBatch,
)

logger = logging.getLogger(__name__)
LOG_PROB_GAP = "parity/log_prob_gap_max"
UNLIKE_GAP = "parity/unlike_log_prob_gap_max"  # of prompts more unlike than a call of the run has
GUIDED_ROUNDING = 10  # guidance multiplies the difference of two velocities
SCHEDULE_TOLERANCE = 1e-6  # both sides compute it in float64 and round once
# by what rounds most on either side; other noise is off by 1 and more
LATENTS_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5, "fp8": 0.5}
# Relative to the largest entry. Prompts of unlike length in one call are 0.056 apart in bfloat16
# (H200, a text encoder of the full size with random weights).
EMBEDDING_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}


def check(
    engine: Engine,
    replicas: RunReplicas,
    calls: Sequence[Call],
    *,
    step: int,
    names: Collection[str] | None = None,
) -> Figures:
    """Recompute the calls of every replica and component, group by group. Collective.

    names: of the replicas; by default all.
    Returns the gaps, each the maximum over groups, replicas, components and ranks:
    parity/log_prob_gap_max, parity/unlike_log_prob_gap_max, parity/schedule_gap_max,
    parity/embedding_gap_max and parity/latents_gap_max; of several components also
    parity/log_prob_gap_max/<component>. Returns {} without calls.

    Raises AgreedError that names replica, group and prompt when a gap is more than verdict()
    allows, unless parity.mode is warn.
    """
    if not calls:
        return {}
    config = engine.config
    mesh = engine.mesh
    fleet = replicas.fleet
    checked = [
        index
        for index, client in enumerate(fleet.replicas)
        if names is None or client.name in names
    ]
    num_replicas = len(checked)
    samplings = component_samplings(engine.adapter, sampling_of(config.rollout))
    gaps: Figures = {}
    problem = ""

    # Equally many on every rank, also where a node has lost a replica: calls are collective.
    num_turns = math.ceil(num_replicas / fleet.num_ranks)
    num_turns = int(all_reduce_max({"turns": num_turns}, mesh.cpu_group)["turns"])
    turns = range(fleet.rank, fleet.rank + num_turns * fleet.num_ranks, fleet.num_ranks)
    for turn, (component, sampling), call in itertools.product(turns, samplings.items(), calls):
        # every rank makes equally many calls: some replicas may answer twice
        replica = checked[turn % num_replicas]
        drawn = sampling
        if not call.is_unlike:
            drawn = at_largest_weight(sampling, engine.adapter.schedule(sampling))
        groups = _sample(fleet, replica, call, drawn, engine=engine, step=step)
        replicas.trim()  # the trainer's forwards need what sampling took

        for index, row in enumerate(_gaps(engine, groups, call, step=step)):
            if not problem and (text := verdict(row, config)):
                problem = f"{text} in {_whose(groups[index], index, len(groups))}"
            if len(samplings) > 1 and LOG_PROB_GAP in row:
                row[f"{LOG_PROB_GAP}/{component}"] = row[LOG_PROB_GAP]
            gaps |= {key: max(gap, gaps.get(key, 0.0)) for key, gap in row.items()}

    gaps = all_reduce_max(gaps, mesh.cpu_group)
    summary = "  ".join(f"{key} {gap:.2e}" for key, gap in gaps.items())
    num_groups = sum(len(call.prompts) for call in calls)
    compared = f"{counted(num_replicas, 'replica')}, {counted(num_groups, 'group')}"
    logger.info("parity with %s: %s", compared, summary)

    # not where the gap was found: the other ranks would wait in the next replica's call
    if problem and config.parity.mode == "warn":
        logger.warning("parity.mode=warn, training goes on: %s", problem)
    elif config.parity.mode != "warn":
        advice = "fix the cause, or set parity.mode=warn to train all the same"
        error = ValueError(f"{problem}; {advice}") if problem else None
        raise_together(error, mesh.cpu_group)

    return gaps


def recomputes(gaps: Figures, algorithm: AlgorithmConfig, *, before: bool) -> bool:
    """Tell whether a step's old log_probs are recomputed by the trainer before its first update.

    gaps: from check(). before: whether the run did so until now, which old_log_prob=auto stays
    with, so that a resumed run equals one that was not stopped.
    """
    if algorithm.old_log_prob != "auto":
        return algorithm.old_log_prob == "recompute"
    if not build_algorithm(algorithm).compares_rollout:
        # Its clip range is of another ratio, and says nothing of this gap. The trainer's log_probs
        # are computed in any case, so to weigh samples by the replicas' costs nothing.
        logger.info(
            "algorithm.old_log_prob=auto with algorithm.name=%s: its ratio is to the trainer's own "
            "policy; the replicas' log_probs weigh samples, whatever the parity gap",
            algorithm.name,
        )
        return True

    gap = gaps[LOG_PROB_GAP]
    limit = half_clip_range(algorithm)
    if gap >= limit and not before:
        logger.warning(
            "algorithm.old_log_prob=auto: the parity gap %.2e is not below half of "
            "algorithm.clip_range, %.2e: from here on old log_probs are the trainer's, a forward "
            "more for samples of all but a step's first update",
            gap,
            limit,
        )
        return True

    logger.info(
        "algorithm.old_log_prob=auto: old log_probs are %s; parity gap %.2e, limit %.2e",
        "the trainer's, as before" if before else "the replicas'",
        gap,
        limit,
    )

    return before


def component_samplings(adapter: ModelAdapter, sampling: Sampling) -> dict[str, Sampling]:
    """Return component → the sampling with its window among the component's own steps.

    Those are the ones that the run's windows may cover; all of them where the windows leave the
    component out. A component that can have no stochastic step is absent.
    """
    low, high = sampling.sde_window_range
    samplings = {}

    for component, steps in component_steps(adapter, sampling).items():
        # The last step (to sigma 0) is never stochastic.
        steps = [step for step in steps if step < sampling.num_inference_steps - 1]
        steps = [step for step in steps if low <= step < high] or steps
        if steps:
            # a run without stochastic steps is checked by two of them
            size = min(sampling.sde_window_size or 2, len(steps))
            within = (steps[0], steps[-1] + 1)
            samplings[component] = replace(sampling, sde_window_size=size, sde_window_range=within)

    return samplings


def verdict(gaps: Figures, config: Config) -> str:
    """Return '' when the gaps are harmless, else what is wrong, with both numbers.

    Half the clip range is too much of a gap where updates are relative to the rollout's log_probs.
    More than rounding is too much where they may be relative to the trainer's, and between prompts
    that no call of the run puts together. Where the loss has no ratio to the rollout's, its clip
    range says nothing, and rounding alone is the limit.
    """
    dtype = config.model.dtype
    compares = build_algorithm(config.algorithm).compares_rollout
    half = half_clip_range(config.algorithm) if compares else 0.0
    different = "rollout and trainer do not compute the same policy"
    rounding, coarsest = _rounding(config)
    beyond_rounding = (max(rounding, half), f"more than {coarsest} rounds: {different}")
    usual = beyond_rounding  # the trainer's own log_probs may be taken instead
    if compares and config.algorithm.old_log_prob == "rollout":
        usual = (half, f"half of algorithm.clip_range: {different}")

    limits = {
        "parity/schedule_gap_max": (
            SCHEDULE_TOLERANCE,
            "the replica samples with another sigma schedule",
        ),
        "parity/embedding_gap_max": (
            EMBEDDING_TOLERANCE[dtype],
            "the replica embeds the prompt differently",
        ),
        "parity/latents_gap_max": (
            LATENTS_TOLERANCE[coarsest],
            "the replica draws other noise, or takes other steps",
        ),
        LOG_PROB_GAP: usual,
        UNLIKE_GAP: beyond_rounding,
    }

    for key, (limit, meaning) in limits.items():
        if gaps.get(key, 0.0) >= limit:
            return f"{key} = {gaps[key]:.3g} >= {limit:.3g} ({meaning})"
    return ""


def _rounding(config: Config) -> tuple[float, str]:
    """Return how far log_probs may be apart by rounding, and the dtype that rounds most."""
    coarsest = "float32"
    if "bfloat16" in (config.model.dtype, config.engine.dtype):
        coarsest = "bfloat16"
    if config.rollout.fp8 or config.engine.fp8 != "none":
        coarsest = "fp8"
    rollout = config.rollout
    scale = max(rollout.true_cfg_scale, rollout.guidance_scale, rollout.guidance_scale_2)
    return LOG_PROB_ROUNDING[coarsest] * (GUIDED_ROUNDING if scale > 1 else 1), coarsest


def _whose(group: RolloutGroup, index: int, count: int) -> str:
    text = group.prompt.text
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    return f"{group.replica}, group {index + 1} of {count} (prompt {shown!r})"


def _sample(
    fleet: Fleet, replica: int, call: Call, sampling: Sampling, *, engine: Engine, step: int
) -> list[RolloutGroup]:
    """Draw the groups in one call of the replica; on every rank of the model group."""
    requests = group_requests(
        PromptBatch(prompts=tuple(call.prompts), repeats=(0,) * len(call.prompts)),
        sampling,
        group_size=call.num_samples,
        seed=engine.config.seed,
        step=step,
        policy_version=step,
    )
    groups = agreed(
        lambda: fleet.generate_on(
            replica, [for_replica(request, engine.adapter) for request in requests]
        ),
        engine.mesh.cpu_group,
        here=engine.mesh.is_model_group_source,
    )

    return broadcast_groups(groups or [], len(requests), mesh=engine.mesh)


def _gaps(
    engine: Engine, groups: Sequence[RolloutGroup], call: Call, *, step: int
) -> list[Figures]:
    """Compare each group with what the trainer computes. Returns a dict of gaps for each.

    A group is computed by itself, where no other row can be taken for its own, and once more
    beside the others in one batch, as an update has them.
    """
    log_prob_key = UNLIKE_GAP if call.is_unlike else LOG_PROB_GAP
    gaps_NW = _log_prob_gaps(engine, _batch(groups))
    rows = []

    for group, conditioning, mixed_GW in zip(
        groups, call.conditioning, gaps_NW.split(call.num_samples), strict=True
    ):
        batch = _batch([group])
        alone_GW = _log_prob_gaps(engine, batch)
        replayed_NSLC = _replay(engine, batch, group, step=step)
        rows.append(
            {
                "parity/schedule_gap_max": _gap(
                    engine.adapter.schedule(group.sampling), group.schedule
                ),
                "parity/embedding_gap_max": _conditioning_gap(
                    conditioning, group, num_end_marks=engine.adapter.num_end_marks
                ),
                "parity/latents_gap_max": _gap(replayed_NSLC, batch.latents_NSLC),
                log_prob_key: max(_largest(alone_GW), _largest(mixed_GW)),
            }
        )

    return rows


def _batch(groups: Sequence[RolloutGroup]) -> TrainBatch:
    shape = (len(groups), len(groups[0].sample_indices))
    return to_train_batch(groups, torch.zeros(shape), torch.ones(shape))


def _log_prob_gaps(engine: Engine, batch: TrainBatch) -> Tensor:
    """Return trainer minus replica, [N, W] float64 on the CPU."""
    assert batch.old_log_probs_NW is not None, "samples of a replica bring its log_probs"
    return log_probs(engine, batch).log_probs_NW - batch.old_log_probs_NW


def _replay(engine: Engine, batch: TrainBatch, group: RolloutGroup, *, step: int) -> Tensor:
    """Recompute the window's latents from the initial noise on, [N, W+1, L, C] float32."""
    shape = tuple(batch.latents_NSLC.shape[2:])
    start = int(batch.window_start_N[0])
    schedule = batch.schedule
    group_key = noise.group_key(seed=engine.config.seed, step=step, prompt_id=group.prompt.id)
    keys = noise.sample_keys(group_key, group.sample_indices)
    initial_keys = noise.initial_keys(keys, same_noise=batch.sampling.same_noise)

    # The device and dtype of what it is compared with.
    latents_NLC = noise.initial_latents_rows(shape, initial_keys).to(batch.latents_NSLC)
    for index in range(start):  # before the window steps are deterministic
        latents_NLC = _step_mean(engine, batch, latents_NLC, index, "ode")

    states = [latents_NLC]
    for index in range(start, start + batch.num_window_steps):
        mean_NLC = _step_mean(engine, batch, states[-1], index, batch.sampling.sde_type)
        sigma_B, sigma_next_B = schedule[index : index + 2].split(1)
        sde_step = sde.SdeStep(batch.sampling, schedule, sigma_B, sigma_next_B)
        noise_NLC = noise.sde_noise_rows(shape, keys, step_index=index)
        states.append(mean_NLC + sde.injected_std(sde_step) * noise_NLC.to(mean_NLC))

    return torch.stack(states, dim=1)


def _step_mean(
    engine: Engine, batch: TrainBatch, latents_NLC: Tensor, index: int, sde_type: str
) -> Tensor:
    """Compute the mean of the step from schedule[index] on, through the engine's own forward."""
    step_batch = replace(
        batch,
        # log_probs() takes a state and the one after it; the latter changes no mean.
        latents_NSLC=torch.stack([latents_NLC, latents_NLC], dim=1),
        trained_steps_NK=torch.zeros(len(latents_NLC), 1, dtype=torch.int64),
        old_log_probs_NW=None,
        window_start_N=torch.full_like(batch.window_start_N, index),
        sampling=replace(batch.sampling, sde_type=sde_type),
    )

    return log_probs(engine, step_batch).means_NWLC[:, 0]


def _conditioning_gap(
    expected: dict[str, Tensor], group: RolloutGroup, *, num_end_marks: int
) -> float:
    """Return the largest difference of the embeddings, relative to their largest entry.

    It is inf when masks or names differ. What the model wrote after a prompt is not compared: the
    replica alone has sampled it.
    """
    if expected.keys() != group.conditioning.keys():
        return math.inf
    gaps = []

    for name, value in expected.items():
        actual = group.conditioning[name]
        if group.sampling.think_tokens and not name.startswith(NEGATIVE):
            # the text stands behind the prompt, before what ends both
            prompt = value.shape[1] - num_end_marks
            end = actual.shape[1] - num_end_marks
            if end <= prompt:
                return math.inf
            actual = torch.cat([actual[:, :prompt], actual[:, end:]], dim=1)
        if value.dtype != torch.bool:
            gaps.append(_gap(value, actual) / float(value.abs().max()))
        elif not torch.equal(value, actual):
            return math.inf

    return max(gaps)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference; inf for another shape."""
    if ours.shape != theirs.shape:
        return math.inf
    return _largest(ours.double().cpu() - theirs.double().cpu())


def _largest(difference: Tensor) -> float:
    """Return the largest magnitude; inf where there is a nan, which no limit admits."""
    gap = float(difference.abs().max())
    return math.inf if math.isnan(gap) else gap
