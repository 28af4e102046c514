"""Which of a model's experts a run trains: what its stochastic windows cover, and whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.train.sampling import sampling_of
from megadiff.types import Sampling


def component_steps(adapter: ModelAdapter, sampling: Sampling) -> dict[str, list[int]]:
    """component → the steps of the schedule whose velocity it gives."""
    components = [adapter.component_of(sigma) for sigma in adapter.schedule(sampling)[:-1].tolist()]
    return {
        each: [step for step, other in enumerate(components) if other == each]
        for each in adapter.components
    }


def window_pairs(adapter: ModelAdapter, sampling: Sampling) -> dict[str, int]:
    """component → its (window start, step of the window) pairs, over all starts that a window may have."""
    low, high = sampling.sde_window_range
    size = sampling.sde_window_size
    covered = [start + offset for start in range(low, high - size + 1) for offset in range(size)]
    return {
        each: sum(map(covered.count, steps))
        for each, steps in component_steps(adapter, sampling).items()
    }


def trained_components(config: Config, adapter: ModelAdapter) -> list[str]:
    """train.components, in the model's order; all where it is empty."""
    return [
        each
        for each in adapter.components
        if each in config.train.components or not config.train.components
    ]


def step_samplings(config: Config, adapter: ModelAdapter) -> list[Sampling]:
    """How the groups of a step are sampled: step i takes number i modulo their count.

    rollout.component_windows=any: one. balanced: one for each trained expert, with its window among that one's steps only; so
    experts get equally many optimizer steps, and in each of them only one has to be on the accelerator and to be pushed.
    """
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
                f"rollout.component_windows=balanced: rollout.sde_window_range=[{low},{high}] has {len(within)} of {component}'s "
                f"steps ({_span(steps[component])}), a window has rollout.sde_window_size={sampling.sde_window_size}; "
                f"{_proposal(adapter, sampling, component)}, or component_windows=any"
            )
        samplings.append(replace(sampling, sde_window_range=(within[0], within[-1] + 1)))
    return samplings


def check_components(config: Config, adapter: ModelAdapter, *, on_policy: bool) -> list[str]:
    """What to warn of before step 1: experts that no window reaches. Raises ValueError for components that the model has
    not, and where nothing would be trained. on_policy: rows come from windows; else from sigmas anywhere."""
    for key, names in (
        ("train.components", config.train.components),
        ("optim.component_lr", config.optim.component_lr),
    ):
        unknown = sorted(set(names) - set(adapter.components))
        if unknown:
            raise ValueError(
                f"{key} names {', '.join(unknown)}, but this model's components are {', '.join(adapter.components)}"
            )
    negative = {name: rate for name, rate in config.optim.component_lr.items() if not rate > 0}
    if negative:
        raise ValueError(
            f"optim.component_lr={negative} is not positive; to leave a component out set train.components"
        )
    return _unreached(config, adapter) if on_policy else []


def describe_components(config: Config, adapter: ModelAdapter) -> dict[str, dict[str, object]]:
    """component → its steps and pairs, whether it is trained; JSON."""
    steps, trained = (
        component_steps(adapter, sampling_of(config.rollout)),
        trained_components(config, adapter),
    )
    pairs = _pairs(config, adapter)
    return {
        each: {"steps": steps[each], "pairs": pairs[each], "trained": each in trained}
        for each in steps
    }


def _pairs(config: Config, adapter: ModelAdapter) -> dict[str, int]:
    """Over the samplings that steps take in turn."""
    found = [window_pairs(adapter, sampling) for sampling in step_samplings(config, adapter)]
    return {component: sum(pairs[component] for pairs in found) for component in adapter.components}


def _unreached(config: Config, adapter: ModelAdapter) -> list[str]:
    sampling, trained, pairs = (
        sampling_of(config.rollout),
        trained_components(config, adapter),
        _pairs(config, adapter),
    )
    steps = component_steps(adapter, sampling)
    low, high = sampling.sde_window_range
    reached = [component for component in trained if pairs[component]]
    if sampling.sde_window_size and not reached:
        raise ValueError(
            f"rollout.sde_window_range=[{low},{high}] reaches none of train.components={trained}; "
            f"{_proposal(adapter, sampling, trained[0])}"
        )
    return [
        f"ONLY {', '.join(reached)} LEARNS: no window of rollout.sde_window_range=[{low},{high}] reaches {component}, which "
        f"has steps {_span(steps[component])} of rollout.num_inference_steps={sampling.num_inference_steps}; "
        f"{_proposal(adapter, sampling, component)} to train both, or train.components=[{','.join(reached)}] to mean it"
        for component in trained
        if reached and component not in reached
    ]


def _proposal(adapter: ModelAdapter, sampling: Sampling, component: str) -> str:
    """The range around the component's nearer end whose windows share their steps evenly between its two sides."""
    steps, (low, _) = component_steps(adapter, sampling)[component], sampling.sde_window_range
    last, size = (
        sampling.num_inference_steps - 1,
        max(sampling.sde_window_size, 1),
    )  # the last step is never stochastic
    if not steps or steps[0] >= last:
        return f"raise rollout.num_inference_steps, with which {component} gets a stochastic step,"
    border = steps[0] if steps[0] > low else steps[-1] + 1
    return f"set rollout.sde_window_range=[{max(0, border - size)},{min(last, border + size)}]"


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]}-{steps[-1]}" if steps else "none"
