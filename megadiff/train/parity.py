"""The parity gate: before step 1 the trainer recomputes what each replica sampled, and says how far apart they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from megadiff.config.schema import AlgorithmConfig, Config
from megadiff.diffusion import noise, sde
from megadiff.engines.base import Engine
from megadiff.models.adapter import FIRST_FRAME, ModelAdapter
from megadiff.parallel.collectives import agreed, all_reduce_max, broadcast_bytes, broadcast_json, raise_together
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.fleet import Fleet
from megadiff.train.batch import to_train_batch
from megadiff.train.experts import component_steps
from megadiff.train.replicas import trim
from megadiff.train.rollout import first_frame_of, for_replica, sampling_of, share
from megadiff.types import DTYPES, LOG_PROB_ROUNDING, Prompt, RolloutGroup, RolloutRequest, Sampling, TrainBatch

logger = logging.getLogger(__name__)
LOG_PROB_GAP = "parity/log_prob_gap_max"
GUIDED_ROUNDING = 10  # guidance multiplies the difference of two velocities
SCHEDULE_TOLERANCE = 1e-6  # both sides compute it in float64 and round once
LATENTS_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}  # other noise is off by 1 and more
EMBEDDING_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest entry


class ParityError(RuntimeError):
    """Trainer and replica disagree by more than the clip range, or rounding, allows."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the gate asks replicas for: the group of the first prompt, sampled in one call with as many of the others as a
    call of the run holds, so that what padding and batching do to it is in the gap. conditioning: what each must answer."""

    prompts: list[Prompt]
    conditioning: dict[str, Tensor]


def prepare(adapter: ModelAdapter, prompts: Sequence[Prompt], *, config: Config, mesh: Mesh) -> Probe | None:
    """Collective. None where parity.mode is off. prompts: of the step to come. Rank 0 loads the text encoder meanwhile, so
    it is called before replicas on the same GPUs hold their weights."""
    if config.parity.mode == "off":
        return None
    prompts = _same_prompts(prompts[: max(1, config.rollout.batch_size // num_gate_samples(config))], mesh)
    return Probe(prompts=prompts, conditioning=_expected_conditioning(adapter, prompts[0], config=config, mesh=mesh))


def check(
    engine: Engine,
    adapter: ModelAdapter,
    fleet: Fleet,
    probe: Probe | None,
    *,
    config: Config,
    mesh: Mesh,
    step: int,
) -> dict[str, float]:
    """Collective. One group of every replica and component is recomputed: schedule, prompt embeddings, latents, log_probs.

    Returns the gaps, each the maximum over replicas, components and ranks: parity/log_prob_gap_max,
    parity/schedule_gap_max, parity/embedding_gap_max, parity/latents_gap_max; of several components each one's
    parity/log_prob_gap_max/<component>, too.
    Raises AgreedError when log_probs, schedule or embeddings differ by what verdict() does not allow, unless parity.mode is
    warn; does nothing without a probe.
    """
    if probe is None:
        return {}
    samplings = component_samplings(adapter, sampling_of(config.rollout))
    rounds = math.ceil(len(fleet.replicas) / mesh.dp)
    gaps: dict[str, float] = {}
    for turn in range(rounds):
        replica = (mesh.dp_rank + turn * mesh.dp) % len(fleet.replicas)
        for component, sampling in samplings.items():
            group = _sample(fleet, replica, probe.prompts, sampling, config=config, mesh=mesh, step=step)
            trim(fleet, config, mesh)
            found = _gaps(engine, adapter, group, probe.conditioning, config=config, mesh=mesh, step=step)
            if len(samplings) > 1:
                found[f"{LOG_PROB_GAP}/{component}"] = found[LOG_PROB_GAP]
            gaps |= {key: max(value, gaps.get(key, 0.0)) for key, value in found.items()}
    gaps = all_reduce_max(gaps, mesh.cpu_group)
    logger.info("parity with %d replicas: %s", len(fleet.replicas), "  ".join(f"{k} {v:.2e}" for k, v in gaps.items()))
    problem = verdict(gaps, config)
    if problem and config.parity.mode == "warn":
        logger.warning("parity.mode=warn, training goes on: %s", problem)
    elif problem:
        raise_together(
            ParityError(f"{problem}; fix the cause, or set parity.mode=warn to train all the same"), mesh.cpu_group
        )
    return gaps


def recomputes(gaps: dict[str, float], algorithm: AlgorithmConfig, *, before: bool) -> bool:
    """Whether a step's old log_probs are the trainer's, from before its first update, as algorithm.old_log_prob says.

    gaps: as check() found them. before: whether the run did so until now, which auto stays with: a run that resumes is the
    one that was not stopped.
    """
    if algorithm.old_log_prob != "auto":
        return algorithm.old_log_prob == "recompute"
    gap, half = gaps[LOG_PROB_GAP], algorithm.clip_range / 2
    anew = before or gap >= half
    if anew and not before:
        logger.warning(
            "algorithm.old_log_prob=auto: the parity gap %.2e is not below half of algorithm.clip_range, %.2e: from here on "
            "old log_probs are the trainer's, a forward more for samples of all but a step's first update", gap, half,
        )  # fmt: skip
    else:
        whose = "the trainer's, as before" if anew else "the replicas'"
        logger.info("algorithm.old_log_prob=auto: old log_probs are %s; parity gap %.2e, limit %.2e", whose, gap, half)
    return anew


def component_samplings(adapter: ModelAdapter, sampling: Sampling) -> dict[str, Sampling]:
    """component → the sampling with its window among the component's own steps: those of them that the run's windows may
    cover, or where these leave it out, all. Without components that no stochastic step could be of."""
    low, high = sampling.sde_window_range
    samplings = {}
    for component, steps in component_steps(adapter, sampling).items():
        steps = [step for step in steps if step < sampling.num_inference_steps - 1]
        steps = [step for step in steps if low <= step < high] or steps
        if steps:
            size = min(sampling.sde_window_size, len(steps))
            within = (steps[0], steps[-1] + 1)
            samplings[component] = replace(sampling, sde_window_size=size, sde_window_range=within)
    return samplings


def verdict(gaps: dict[str, float], config: Config) -> str:
    """'' when the gaps are harmless, else what is wrong, with both numbers.

    Where the rollout's log_probs are what updates are relative to, half the clip range is too much of their gap; where
    they may be the trainer's, what is more than rounding.
    """
    dtype = config.model.dtype
    limits = {
        "parity/schedule_gap_max": (SCHEDULE_TOLERANCE, "the replica samples with another sigma schedule"),
        "parity/embedding_gap_max": (EMBEDDING_TOLERANCE[dtype], "the replica embeds the prompt differently"),
        "parity/latents_gap_max": (LATENTS_TOLERANCE[dtype], "the replica draws other noise, or takes other steps"),
        LOG_PROB_GAP: _log_prob_limit(config),
    }
    for key, (limit, meaning) in limits.items():
        if gaps[key] >= limit:
            return f"{key} = {gaps[key]:.3g} >= {limit:.3g} ({meaning})"
    return ""


def _log_prob_limit(config: Config) -> tuple[float, str]:
    different, half = "rollout and trainer do not compute the same policy", config.algorithm.clip_range / 2
    if config.algorithm.old_log_prob == "rollout":
        return half, f"half of algorithm.clip_range: {different}"
    coarsest = "bfloat16" if "bfloat16" in (config.model.dtype, config.engine.dtype) else "float32"
    if config.rollout.fp8 or config.engine.fp8 != "none":
        coarsest = "fp8"
    guided = max(config.rollout.true_cfg_scale, config.rollout.guidance_scale, config.rollout.guidance_scale_2) > 1
    rounding = LOG_PROB_ROUNDING[coarsest] * (GUIDED_ROUNDING if guided else 1)
    return max(rounding, half), f"more than {coarsest} rounds: {different}"


def num_gate_samples(config: Config) -> int:
    """Of each group that is sampled for the gate."""
    return min(config.algorithm.group_size, config.train.microbatch_size)


def _same_prompts(prompts: Sequence[Prompt], mesh: Mesh) -> list[Prompt]:
    plain = [asdict(replace(prompt, fields={})) for prompt in prompts]
    return [Prompt(**each) for each in broadcast_json(plain, source=0, group=mesh.cpu_group)]  # type: ignore[union-attr]


def _expected_conditioning(adapter: ModelAdapter, prompt: Prompt, *, config: Config, mesh: Mesh) -> dict[str, Tensor]:
    """What every replica must answer as conditioning, encoded once, on global rank 0, and sent to all."""
    sampling, texts = sampling_of(config.rollout), {"": prompt.text}
    if any(adapter.num_passes(component, sampling) > 1 for component in adapter.components):
        texts["negative_"] = prompt.negative_text

    def encode() -> bytes:
        tensors = {}
        for prefix, text in texts.items():
            embeds, mask = adapter.encode_prompt([text], dtype=DTYPES[config.model.dtype], device=mesh.device)
            tensors |= {f"{prefix}prompt_embeds": embeds, f"{prefix}prompt_mask": mask}
        if sampling.first_frame:
            pixels = torch.tensor(first_frame_of(prompt, sampling))
            with adapter.image_encoder(dtype=DTYPES[config.model.dtype], device=mesh.device) as encode_images:
                tensors[FIRST_FRAME] = encode_images(pixels[None]).cpu()
        return save({name: tensor.contiguous() for name, tensor in tensors.items()})

    payload = agreed(encode, mesh.cpu_group, here=mesh.rank == 0)
    return load(broadcast_bytes(payload, source=0, group=mesh.cpu_group))


def _sample(
    fleet: Fleet, replica: int, prompts: Sequence[Prompt], sampling: Sampling, *, config: Config, mesh: Mesh, step: int
) -> RolloutGroup:
    """The first prompt's group, sampled together with the others'."""
    requests = [
        RolloutRequest(
            prompt=prompt,
            sampling=sampling,
            sample_indices=tuple(range(num_gate_samples(config))),
            seed=config.seed,
            step=step,
            policy_version=step,
        )
        for prompt in prompts
    ]
    groups = agreed(
        lambda: fleet.generate_on(replica, list(map(for_replica, requests))),
        mesh.cpu_group,
        here=mesh.is_model_group_source,
    )
    return share(groups[:1] if groups else [], 1, mesh=mesh)[0]


def _gaps(
    engine: Engine,
    adapter: ModelAdapter,
    group: RolloutGroup,
    expected: dict[str, Tensor],
    *,
    config: Config,
    mesh: Mesh,
    step: int,
) -> dict[str, float]:
    num_samples = len(group.trajectories)
    batch = to_train_batch([group], torch.zeros(1, num_samples), torch.ones(1))
    log_probs_NW = engine.log_probs(batch).log_probs_NW
    replayed_NSLC = _replay(engine, batch, group, seed=config.seed, step=step)
    return {
        "parity/schedule_gap_max": _gap(adapter.schedule(group.sampling), group.schedule),
        "parity/embedding_gap_max": _conditioning_gap(expected, group),
        "parity/latents_gap_max": _gap(replayed_NSLC, batch.latents_NSLC),
        LOG_PROB_GAP: _gap(log_probs_NW, batch.old_log_probs_NW),
    }


def _replay(engine: Engine, batch: TrainBatch, group: RolloutGroup, *, seed: int, step: int) -> Tensor:
    """The window's latents recomputed from the initial noise on, [N, W+1, L, C] float32."""
    shape = tuple(batch.latents_NSLC.shape[2:])
    start = int(batch.window_start_N[0])
    identities = [
        {"seed": seed, "step": step, "prompt_id": group.prompt.id, "sample_index": sample.sample_index}
        for sample in group.trajectories
    ]
    latents_NLC = torch.stack([noise.initial_latents(shape, **identity) for identity in identities])
    latents_NLC = latents_NLC.to(batch.latents_NSLC)
    states = []
    sampling = batch.sampling
    for index in range(start + batch.num_window_steps):
        stochastic = index >= start
        if stochastic:
            states.append(latents_NLC)
        mean_NLC = _one_mean(engine, batch, latents_NLC, index, sampling.sde_type if stochastic else "ode")
        if stochastic:
            sigma, sigma_next = batch.schedule[index : index + 1], batch.schedule[index + 1 : index + 2]
            std = sde.injected_std(sampling.sde_type, sigma, sigma_next, schedule=batch.schedule, eta=sampling.eta)
            draws = [noise.sde_noise(shape, step_index=index, **identity) for identity in identities]
            mean_NLC = mean_NLC + std * torch.stack(draws).to(mean_NLC)
        latents_NLC = mean_NLC
    return torch.stack([*states, latents_NLC], dim=1)


def _one_mean(engine: Engine, batch: TrainBatch, latents_NLC: Tensor, index: int, sde_type: str) -> Tensor:
    """Mean of the step from schedule[index] on, through the engine's own forward."""
    one = replace(
        batch,
        latents_NSLC=torch.stack([latents_NLC, latents_NLC], dim=1),
        old_log_probs_NW=None,
        window_start_N=torch.full_like(batch.window_start_N, index),
        sampling=replace(batch.sampling, sde_type=sde_type),
    )
    return engine.log_probs(one).means_NWLC[:, 0]


def _conditioning_gap(expected: dict[str, Tensor], group: RolloutGroup) -> float:
    """Largest difference of the embeddings relative to their largest entry; inf when masks or names differ."""
    if expected.keys() != group.conditioning.keys():
        return math.inf
    gaps = [
        _gap(value, group.conditioning[name]) / (1.0 if value.dtype == torch.bool else float(value.abs().max()))
        for name, value in expected.items()
    ]
    masks_equal = all(
        torch.equal(value, group.conditioning[name]) for name, value in expected.items() if value.dtype == torch.bool
    )
    return max(gaps) if masks_equal else math.inf


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; inf for another shape, and when either holds a nan (no limit admits it)."""
    if ours.shape != theirs.shape:
        return math.inf
    gap = float((ours.double().cpu() - theirs.double().cpu()).abs().max())
    return math.inf if math.isnan(gap) else gap
