"""Check a run's config before anything heavy starts: all that a user can get wrong."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing
from operator import attrgetter
from pathlib import Path

from megadiff.algorithms import REFERENCE, Algorithm, build_algorithm
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.data.images import ImageSource, open_images
from megadiff.data.prompts import load_prompts
from megadiff.diffusion.schedule import check_window
from megadiff.engines.lora import check_start
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.observe.trackers import check_trackers
from megadiff.parallel.mesh import (
    Layout,
    check_heads,
    check_nodes,
    local_world_size_of,
    resolve_layout,
)
from megadiff.rewards.score import Scorer
from megadiff.rollout.limits import Limits
from megadiff.train.check_algorithm import ITEMS, check_algorithm
from megadiff.train.check_judges import check_judges
from megadiff.train.components import check_components
from megadiff.train.evaluate import groups_in_a_call, spread
from megadiff.train.probe import own_size
from megadiff.train.replicas import check_num_replicas
from megadiff.train.sampling import sampling_of
from megadiff.types import Prompt, Sampling

logger = logging.getLogger(__name__)


def check(
    config: Config, *, world_size: int, stack: ExitStack, ranks_per_node: int | None = None
) -> tuple[Layout, ModelAdapter, list[Prompt] | ImageSource, Scorer | None]:
    """Check all that needs neither a process group nor a GPU. Raises ValueError (ConfigError).

    The third value is what the run trains on: prompts, or for supervised training captioned images.
    The scorer, None without rewards, has them constructed once for the run. `stack` closes it.
    ranks_per_node: by default as torchrun says.
    """
    parallel = config.parallel
    layout = resolve_layout(
        dp=parallel.dp,
        sp=parallel.sp,
        tp=parallel.tp,
        dp_replicate=parallel.dp_replicate,
        world_size=world_size,
    )
    ranks_per_node = ranks_per_node or local_world_size_of(world_size)
    check_nodes(layout, ranks_per_node=ranks_per_node)
    # first what costs nothing: a wrong key must not wait for a model or a reward to load
    algorithm = build_algorithm(config.algorithm)
    validate(config, dp=layout.dp, on_policy=algorithm.on_policy)
    check_algorithm(config, algorithm)
    check_trackers(config.track)
    check_judges(config)
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not (resume and Path(resume).is_dir()):
        raise ValueError(
            f"checkpoint.resume={resume} is no folder; give a checkpoint's, auto or never"
        )

    check_num_replicas(config, num_nodes=max(1, world_size // ranks_per_node))
    sampling = sampling_of(config.rollout)
    on_policy = algorithm.on_policy
    if on_policy:
        check_window(sampling)
    _check_lora_start(config, algorithm)

    adapter = _checked_adapter(config, layout, sampling, has_steps=algorithm.rows == "steps")
    prompts = read_prompts(config, config.data.prompts) if on_policy else []
    asked = [*prompts, *eval_prompts(config)]
    adapter.check_prompts(asked)

    scorer = None
    if config.reward:
        scorer = stack.enter_context(closing(Scorer(config.reward)))
        scorer.validate(asked)  # held-out prompts too: an evaluation may be hours away

    _check_calls(config, sampling, dp=layout.dp, on_policy=on_policy)
    if on_policy:
        return layout, adapter, prompts, scorer
    kind = ITEMS[algorithm.rows]
    source = open_images(attrgetter(kind.key)(config), seed=config.seed, kind=kind)
    return layout, adapter, source, scorer


def _check_lora_start(config: Config, algorithm: Algorithm) -> None:
    """Raise ValueError where the reference would lack the LoRA that training starts from."""
    if config.lora.start and REFERENCE in algorithm.needs:
        or_without_kl = "set algorithm.kl_coef=0, or " if config.algorithm.kl_coef else ""
        raise ValueError(
            f"lora.start={config.lora.start} with algorithm.name={config.algorithm.name} and "
            f"algorithm.kl_coef={config.algorithm.kl_coef}: the reference would be the model "
            f"without the LoRA that training starts from; {or_without_kl}merge them by "
            f"`megadiff convert {config.lora.start} MODEL --to merged --base {config.model.path}` "
            "and set model.path=MODEL lora.start=''"
        )


def _checked_adapter(
    config: Config, layout: Layout, sampling: Sampling, *, has_steps: bool
) -> ModelAdapter:
    """Return the model's adapter. Raises ValueError where the config does not fit the model."""
    model = Path(config.model.path)
    try:
        check_model_folder(model, config.model.family)
    except ValueError as error:
        raise ValueError(f"model.path={config.model.path}: {error}") from error

    adapter = build_adapter(model, config.model.family)
    adapter.validate(sampling)
    if config.model.float32_streams:
        adapter.check_float32_streams()
    for warning in check_components(config, adapter, has_steps=has_steps):
        if os.environ.get("RANK", "0") == "0":  # there is no mesh yet
            logger.warning("%s", warning)
    check_heads(adapter.num_heads, sp=layout.sp, tp=layout.tp)
    check_start(config.lora, adapter)

    # replicas split the same heads, by a size of their own
    if adapter.num_heads % config.rollout.tp:
        raise ValueError(
            f"rollout.tp={config.rollout.tp} does not divide the model's {adapter.num_heads} "
            f"attention heads; set rollout.tp to a divisor of {adapter.num_heads}"
        )
    return adapter


def _check_calls(config: Config, sampling: Sampling, *, dp: int, on_policy: bool) -> None:
    """Raise ValueError where a call would bring more first frames than a replica takes."""
    # a rank's groups of a step may fill less than one call
    rank_groups = config.train.prompts_per_step // dp
    if on_policy:
        call_groups = config.rollout.batch_size // config.algorithm.group_size
        check_call(sampling, min(rank_groups, call_groups), what="a step")
    if on_policy and config.parity.mode != "off":
        check_call(sampling, min(rank_groups, own_size(config)[0]), what="the parity gate")
    plan = spread(eval_prompts(config), config.eval.num_samples) if config.eval.every else []
    for rank in range(min(dp, len(plan))):
        most = groups_in_a_call(plan[rank::dp], config)
        check_call(sampling, most, what="an evaluation")


def check_call(sampling: Sampling, num_groups: int, *, what: str) -> None:
    """Check the number of groups in a call against what a replica takes. what: makes the call.

    Raises ValueError when their first frames are too many.
    """
    limits = Limits()
    most = max(1, limits.num_first_frames(height=sampling.height, width=sampling.width))
    if sampling.first_frame and num_groups > most:
        raise ValueError(
            f"rollout.batch_size makes {what} ask for {num_groups} groups in a call, each with a "
            f"first frame of {sampling.width}x{sampling.height}; a replica takes {most} of them "
            f"({limits.json_bytes >> 20} MiB): set rollout.batch_size<={most}"
        )


def read_prompts(config: Config, path: str) -> list[Prompt]:
    """Load prompts by the config's limits and, where it asks for first frames, their size."""
    rollout = config.rollout
    size = (rollout.height, rollout.width) if rollout.first_frame else None
    return load_prompts(path, max_chars=config.data.max_prompt_chars, first_frame_size=size)


def eval_prompts(config: Config) -> list[Prompt]:
    """Return the prompts of eval.prompts, none where eval.every is 0.

    Raises ValueError when eval.num_samples cannot cover their tasks.
    """
    if not config.eval.every:
        return []
    prompts = read_prompts(config, config.eval.prompts)
    spread(prompts, config.eval.num_samples)
    return prompts
