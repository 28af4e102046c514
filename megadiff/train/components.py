"""Tell which components a run trains: those that its stochastic windows reach, by turns or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.train.sampling import sampling_of
from megadiff.types import Sampling


def component_steps(adapter: ModelAdapter, sampling: Sampling) -> dict[str, list[int]]:
    """Return component → the steps of the schedule whose velocity it gives."""
    components = [adapter.component_of(sigma) for sigma in adapter.schedule(sampling)[:-1].tolist()]
    steps: dict[str, list[int]] = {name: [] for name in adapter.components}
    for step, name in enumerate(components):
        steps[name].append(step)
    return steps


def trained_components(config: Config, adapter: ModelAdapter) -> list[str]:
    """Return train.components in the model's order, all where it is empty."""
    chosen = config.train.components or adapter.components
    return [name for name in adapter.components if name in chosen]


def step_samplings(config: Config, adapter: ModelAdapter) -> list[Sampling]:
    """Return how groups are sampled: step i takes number i modulo their count.

    rollout.component_windows=any gives one range of windows. balanced gives one for each trained
    component, among that component's steps only. So components get equally many optimizer steps,
    and in each of them only one has to be on the accelerator and to be pushed.
    With rollout.sde_window_moves a range's window slides over it (MixGRPO, arXiv 2507.21802): on by
    one step after so many of the range's own turns, and from its end back to its start.
    """
    moves = config.rollout.sde_window_moves
    cycles = [_slid(sampling, moves) for sampling in _ranges(config, adapter)]
    num_turns = math.lcm(*map(len, cycles))
    return [cycle[turn % len(cycle)] for turn in range(num_turns) for cycle in cycles]


def _slid(sampling: Sampling, moves: int) -> list[Sampling]:
    """Return the samplings that a range's turns take: itself without moves, else fixed windows."""
    if not moves:
        return [sampling]
    low, high = sampling.sde_window_range
    size = sampling.sde_window_size
    starts = range(low, high - size + 1)
    windows = [replace(sampling, sde_window_range=(start, start + size)) for start in starts]
    return [window for window in windows for _ in range(moves)]


def _ranges(config: Config, adapter: ModelAdapter) -> list[Sampling]:
    """Return a sampling for each range that windows lie in."""
    sampling = sampling_of(config.rollout)
    if config.rollout.component_windows == "any":
        return [sampling]
    low, high = sampling.sde_window_range

    steps = component_steps(adapter, sampling)
    samplings = []
    for component in trained_components(config, adapter):
        within = [step for step in steps[component] if low <= step < high]
        if len(within) < max(sampling.sde_window_size, 1):
            raise ValueError(
                f"rollout.component_windows=balanced: rollout.sde_window_range=[{low},{high}] has "
                f"{len(within)} of {component}'s steps ({_span(steps[component])}), a window has "
                f"rollout.sde_window_size={sampling.sde_window_size}; "
                f"{_proposal(adapter, sampling, component)}, or component_windows=any"
            )
        # sigmas fall, so a component's steps follow each other
        samplings.append(replace(sampling, sde_window_range=(within[0], within[-1] + 1)))
    return samplings


def check_components(config: Config, adapter: ModelAdapter, *, has_steps: bool) -> list[str]:
    """Return warnings before step 1, of components that no window reaches.

    Raises ValueError for components that the model has not, and where nothing would be trained.
    has_steps: rows come from windows, else from sigmas anywhere.
    """
    for key, names in (
        ("train.components", config.train.components),
        ("optim.component_lr", config.optim.component_lr),
    ):
        unknown = sorted(set(names) - set(adapter.components))
        if unknown:
            raise ValueError(
                f"{key} names {', '.join(unknown)}, but this model's components are "
                f"{', '.join(adapter.components)}"
            )

    negative = {name: rate for name, rate in config.optim.component_lr.items() if not rate > 0}
    if negative:
        raise ValueError(
            f"optim.component_lr={negative} is not positive; "
            "to leave a component out set train.components"
        )

    # sigmas are else drawn from the whole schedule, which reaches every component
    return _unreached(config, adapter) if has_steps else []


def describe_components(config: Config, adapter: ModelAdapter) -> dict[str, dict[str, object]]:
    """Return component → its steps and pairs and whether it is trained, as JSON."""
    trained = trained_components(config, adapter)
    pairs = window_pairs(config, adapter)
    return {
        name: {"steps": steps, "pairs": pairs[name], "trained": name in trained}
        for name, steps in component_steps(adapter, sampling_of(config.rollout)).items()
    }


def window_pairs(config: Config, adapter: ModelAdapter) -> dict[str, int]:
    """Count each component's (window start, step of the window) pairs over all possible starts.

    Those are the starts of all samplings that steps take in turn.
    """
    covered: list[int] = []
    for sampling in dict.fromkeys(step_samplings(config, adapter)):
        low, high = sampling.sde_window_range
        size = sampling.sde_window_size
        # a window begins anywhere in the range with equal chance, so inner steps count more
        for start in range(low, high - size + 1):
            covered += range(start, start + size)
    steps = component_steps(adapter, sampling_of(config.rollout))
    return {name: sum(map(covered.count, steps[name])) for name in steps}


def forwards_per_sample(config: Config, adapter: ModelAdapter) -> float:
    """Return how many velocities a replica computes for a sample, the mean over windows."""
    rollout = config.rollout
    if not rollout.same_noise:
        return rollout.num_inference_steps
    ends = [sum(sampling.sde_window_range) for sampling in _ranges(config, adapter)]
    # as RolloutGroup.num_forwards; starts are uniform, or pass over all of the range
    num_shared = (fmean(ends) - rollout.sde_window_size) / 2 + 1
    return rollout.num_inference_steps - num_shared * (1 - 1 / config.algorithm.group_size)


def _unreached(config: Config, adapter: ModelAdapter) -> list[str]:
    sampling = sampling_of(config.rollout)
    trained = trained_components(config, adapter)
    pairs = window_pairs(config, adapter)
    steps = component_steps(adapter, sampling)
    window_range = "rollout.sde_window_range=[{},{}]".format(*sampling.sde_window_range)

    reached = [component for component in trained if pairs[component]]
    if sampling.sde_window_size and not reached:
        raise ValueError(
            f"{window_range} reaches none of train.components={trained}; "
            f"{_proposal(adapter, sampling, trained[0])}"
        )

    return [
        f"ONLY {', '.join(reached)} LEARNS: no window of {window_range} "
        f"reaches {component}, which has steps {_span(steps[component])} of "
        f"rollout.num_inference_steps={sampling.num_inference_steps}; "
        f"{_proposal(adapter, sampling, component)} to train both, or "
        f"train.components=[{','.join(reached)}] to mean it"
        for component in trained
        if reached and component not in reached
    ]


def _proposal(adapter: ModelAdapter, sampling: Sampling, component: str) -> str:
    """Propose the range around the component's nearer end, with as many steps on either side."""
    steps = component_steps(adapter, sampling)[component]
    low, _ = sampling.sde_window_range
    last = sampling.num_inference_steps - 1  # which is never stochastic
    size = max(sampling.sde_window_size, 1)
    if not steps or steps[0] >= last:
        return f"raise rollout.num_inference_steps, with which {component} gets a stochastic step,"
    # a window over the border has steps of both components
    border = steps[0] if steps[0] > low else steps[-1] + 1
    return f"set rollout.sde_window_range=[{max(0, border - size)},{min(last, border + size)}]"


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]}-{steps[-1]}" if steps else "none"
