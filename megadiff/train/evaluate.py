"""Evaluation through the replicas: pure ODE samples with fixed noise identities, scored by the run's rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megadiff.observe.timers import Timers
from megadiff.parallel.collectives import all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.rewards.score import Scorer
from megadiff.rollout.fleet import Fleet
from megadiff.train.rollout import group_requests, sample_and_score
from megadiff.types import Prompt, Sampling

EVAL_STEP = -1  # of the noise identity: never a training step, and the same at every evaluation


def evaluate(
    fleet: Fleet,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    samples_per_prompt: int,
    seed: int,
    policy_version: int | None,
    mesh: Mesh,
) -> dict[str, float]:
    """Collective; each data-parallel rank takes its share of the prompts. Returns `eval/<reward>` means over all samples."""
    requests = group_requests(
        prompts[mesh.dp_rank :: mesh.dp],
        sampling=replace(sampling, sde_type="ode", sde_window_size=0),
        group_size=samples_per_prompt,
        seed=seed,
        step=EVAL_STEP,
        policy_version=policy_version,
    )
    _, rewards = sample_and_score(fleet, scorer, requests, mesh=mesh, timers=Timers())
    names = ["total", *scorer.rewards]
    sums = {name: float(rewards[name].double().sum()) if requests else 0.0 for name in names}
    sums = all_reduce_sums(sums | {"count": float(len(requests) * samples_per_prompt)}, mesh.cpu_group)
    count = sums.pop("count")
    return {f"eval/{'mean' if name == 'total' else name}": value / count for name, value in sums.items()}
