"""Find settings with which a run fits that does not: each is planned before it is advised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megadiff.config.schema import Config
from megadiff.planner.engine_memory import Placing
from megadiff.planner.footprint import size_replicas
from megadiff.planner.memory_plan import Estimate, MemoryPlan, estimate_placing, make_plan
from megadiff.planner.work import Machine
from megadiff.train.check_model import check_replicas
from megadiff.train.replicas import replicas_per_node

Settings = Mapping[str, object]  # key of the config → value
MAX_LAYOUTS = 3  # with the smallest peaks; a try takes half a second
MORE_GPUS = (2, 4, 8)  # times as many
REGISTRY = "FOLDER"
LORA_RANK = 32  # of the last remedy: frozen weights have neither gradients nor moments
ROWS = "train.microbatch_size"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Settings that make a layout fit, beside the layout's own keys. machine: with its GPUs."""

    settings: Settings
    estimate: Estimate
    machine: Machine


def find_remedy(plan: MemoryPlan) -> Remedy | None:
    """Return the cheapest settings that fit on these GPUs, else on more of them; None for none.

    One setting is tried before several, and of several those that are not needed are left out.
    Where all weights are trained and nothing helps, LoRA is tried in the same way.
    """
    tries = _Tries(plan)
    steps = [step for step in _steps(plan) if tries.is_allowed([step], plan.machine)]
    # Of microbatches only the smallest: the settings that win are refined afterwards.
    together = [step for step in steps if step.get(ROWS, 1) == 1]
    placings = [estimate.placing for estimate in plan.nearest[:MAX_LAYOUTS]]

    for step in steps:
        if tries.fits(placings[0], [step], plan.machine):
            return tries.remedy([step], plan.machine)

    for placing in placings:
        if tries.fits(placing, together, plan.machine):
            needed = tries.needed(placing, together, plan.machine)
            return tries.remedy(needed, plan.machine)

    # More GPUs hold less each of what is sharded over data parallelism.
    for machine in more_machines(plan.machine):
        times = machine.world_size // plan.machine.world_size
        layout = placings[0].layout
        larger = replace(layout, world_size=machine.world_size, dp=times * layout.dp)
        placing = replace(placings[0], layout=larger)
        if tries.fits(placing, together, machine):
            # None where the plan itself does not choose such a layout
            remedy = tries.remedy(tries.needed(placing, together, machine), machine)
            if remedy:
                return remedy

    return None if plan.config.lora.rank else _lora_remedy(plan)


def more_machines(machine: Machine) -> list[Machine]:
    """Return MORE_GPUS times the machine, where that is whole nodes."""
    larger = [replace(machine, world_size=times * machine.world_size) for times in MORE_GPUS]
    return [candidate for candidate in larger if candidate.has_whole_nodes]


def _lora_remedy(plan: MemoryPlan) -> Remedy | None:
    """Return LoRA with what it needs besides; None where that does not fit either."""
    settings: dict[str, object] = {"lora.rank": LORA_RANK}
    engine = plan.config.engine
    # the config refuses both together
    if engine.fp8 != "none" and engine.backend == "megatron":
        settings["engine.fp8"] = "none"
    changed = with_settings(plan.config, [settings])
    adapter = plan.model.adapter
    try:
        lora_plan = make_plan(changed, adapter, machine=plan.machine, text_tokens=plan.text_tokens)
    except ValueError:  # a family may have no layer for LoRA
        return None
    if lora_plan.pick:
        return Remedy(settings=settings, estimate=lora_plan.pick, machine=plan.machine)
    if not lora_plan.nearest:
        return None

    remedy = find_remedy(lora_plan)
    return replace(remedy, settings={**settings, **remedy.settings}) if remedy else None


class _Tries:
    """Plans layouts with changed settings. steps: settings, the cheapest first."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._model = plan.model
        self._config = plan.config
        self._text_tokens = plan.text_tokens

    def is_allowed(self, steps: Sequence[Settings], machine: Machine) -> bool:
        """Tell whether a run would start its replicas with these settings."""
        config = with_settings(self._config, steps)
        try:
            check_replicas(config, self._model.adapter, num_nodes=machine.num_nodes)
        except ValueError:
            return False
        return True

    def fits(self, placing: Placing, steps: Sequence[Settings], machine: Machine) -> bool:
        """Tell whether one layout fits, with replicas that a run would start."""
        if not self.is_allowed(steps, machine):
            return False
        config = with_settings(self._config, steps)
        text_tokens = self._text_tokens
        replicas = size_replicas(config, self._model, machine, text_tokens=text_tokens)
        estimate = estimate_placing(
            config, self._model, placing, replicas, machine, text_tokens=text_tokens
        )
        return estimate.fits(machine)

    def needed(
        self, placing: Placing, steps: Sequence[Settings], machine: Machine
    ) -> Sequence[Settings]:
        """Leave out, the dearest first, every step without which the layout fits as well."""
        for step in reversed(steps):
            fewer = [other for other in steps if other is not step]
            if self.fits(placing, fewer, machine):
                steps = fewer

        # The smallest microbatch was tried; the largest that fits is faster.
        others = [step for step in steps if ROWS not in step]
        if len(others) < len(steps):
            for rows in _halves(self._config.train.microbatch_size):
                if self.fits(placing, [*others, {ROWS: rows}], machine):
                    return [*others, {ROWS: rows}]

        return steps

    def remedy(self, steps: Sequence[Settings], machine: Machine) -> Remedy | None:
        """Return the settings with the layout that is preferred under them."""
        config = with_settings(self._config, steps)
        if config.rollout.mode == "separate":
            # Somebody else starts them, and the run waits for so many.
            count = replicas_per_node(
                config, num_nodes=1, num_ranks=machine.world_size, on_gpus=True
            )
            steps = [*steps, {"rollout.num_replicas": count}]
        adapter = self._model.adapter
        plan = make_plan(config, adapter, machine=machine, text_tokens=self._text_tokens)
        settings = {
            key: value
            for step in steps
            for key, value in step.items()
            if value != _value(self._config, key)
        }
        return Remedy(settings=settings, estimate=plan.pick, machine=machine) if plan.pick else None


def _value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_settings(config: Config, steps: Sequence[Settings]) -> Config:
    """Return the config with these keys set."""
    for step in steps:
        for key, value in step.items():
            section, _, name = key.partition(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
    return config


def _steps(plan: MemoryPlan) -> Iterator[Settings]:
    """Yield what may help, the cheapest first."""
    config = plan.config
    rollout = config.rollout
    machine = plan.machine
    is_colocated = plan.replicas.per_gpu > 0
    num_gpus = min(machine.world_size, machine.gpus_per_node)

    # A replica's workers share its weights; its samples come a little later.
    splits = plan.model.adapter.num_heads % 2 == 0 and num_gpus % 2 == 0
    if is_colocated and rollout.tp == 1 and rollout.num_replicas == 0 and splits:
        yield {"rollout.tp": 2}
    if is_colocated and not plan.replicas.sleeps:
        yield {"rollout.sleep": "always"}
    if config.engine.offload == "never":
        yield {"engine.offload": "auto"}
    for rows in _halves(config.train.microbatch_size):
        yield {ROWS: rows}
    if config.engine.activation_memory_budget > 0:
        yield {"engine.activation_memory_budget": 0}
    if is_colocated:
        # What is there for replicas on the trainer's GPUs is refused beside others.
        yield {
            "rollout.mode": "separate",
            "rollout.registry": REGISTRY,
            "rollout.sleep": "auto",
            "rollout.tp": rollout.tp,
            "engine.offload": "never" if config.engine.offload == "never" else "auto",
        }


def _halves(rows: int) -> Iterator[int]:
    """Yield half of the rows, a quarter, … 1."""
    while rows > 1:
        rows //= 2
        yield rows
