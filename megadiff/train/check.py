"""Check a run's config before anything heavy starts: all that a user can get wrong."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from functools import partial
from operator import attrgetter
from pathlib import Path

from megadiff.algorithms import REFERENCE, Algorithm, build_algorithm
from megadiff.checkpoint.run_folders import PROGRESS, is_checkpoint, whole_looking
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
    rank_from_env,
    resolve_layout,
)
from megadiff.rewards.score import Scorer
from megadiff.rollout.limits import Limits
from megadiff.train.check_algorithm import (
    ITEMS,
    check_algorithm,
    constants_without_use,
    unbalanced_rewards,
)
from megadiff.train.check_judges import check_judges
from megadiff.train.check_model import check_model, check_replicas
from megadiff.train.components import check_components
from megadiff.train.evaluate import spread
from megadiff.train.resume_point import check_resume_point
from megadiff.train.run import check_run_folder
from megadiff.train.sampling import given_images, named, sampling_of
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
    unused = constants_without_use(config.algorithm, algorithm)
    if unused:
        name = config.algorithm.name
        logger.info("algorithm.name=%s has no use for %s", name, ", ".join(unused))
    check_trackers(config.track)
    check_judges(config)
    check_run_folder(config)
    _check_resume(config.checkpoint.resume)
    if rank_from_env() == 0:
        check_resume_point(config)

    on_policy = algorithm.on_policy
    if on_policy:
        check_window(sampling_of(config.rollout))
        _check_weights(config)
        _warn_once(unbalanced_rewards(config))
    _check_lora_start(config, algorithm)

    adapter = _checked_adapter(config, layout, algorithm)
    check_replicas(config, adapter, num_nodes=max(1, world_size // ranks_per_node))
    prompts = read_prompts(config, config.data.prompts, adapter) if on_policy else []
    _warn_once(_repeated_prompts(config, prompts, dp=layout.dp))
    asked = [*prompts, *eval_prompts(config, adapter)]
    adapter.check_prompts(asked)

    scorer = None
    if config.reward:
        scorer = stack.enter_context(closing(Scorer(config.reward)))
        scorer.validate(asked)  # held-out prompts too: an evaluation may be hours away

    if on_policy:
        return layout, adapter, prompts, scorer
    kind = ITEMS[algorithm.rows]
    source = open_images(attrgetter(kind.key)(config), seed=config.seed, kind=kind)
    return layout, adapter, source, scorer


def _warn_once(warning: str) -> None:
    """Log a warning on rank 0, unless it is empty."""
    if warning and rank_from_env() == 0:
        logger.warning("%s", warning)


def _check_resume(resume: str) -> None:
    """Raise ValueError where checkpoint.resume names no checkpoint."""
    if resume in ("auto", "never"):
        return
    folder = Path(resume)
    if not (resume and folder.is_dir()):
        raise ValueError(
            f"checkpoint.resume={resume} is no folder; give a checkpoint's, auto or never"
        )
    if is_checkpoint(folder):
        return

    # A run's folder is easily taken for that of its checkpoint.
    inside = whole_looking(folder) or whole_looking(folder / "checkpoints")
    advice = f"{inside[-1]}, the newest in it" if inside else "a checkpoint's folder (step_…)"
    raise ValueError(
        f"checkpoint.resume={resume} is no checkpoint, as it holds no {PROGRESS}; give {advice}"
    )


def _repeated_prompts(config: Config, prompts: list[Prompt], *, dp: int) -> str:
    """Return a warning where a step needs more prompts than there are, else ""."""
    wanted = config.train.prompts_per_step
    if not 0 < len(prompts) < wanted:
        return ""
    text = (
        f"train.prompts_per_step={wanted} > {len(prompts)} prompts of data.prompts="
        f"{config.data.prompts}: a step holds some of them more than once; give more prompts"
    )
    most = len(prompts) // dp * dp
    if most:
        text += f", or set train.prompts_per_step={most} and a larger algorithm.group_size"
    return text


def _check_weights(config: Config) -> None:
    """Raise ValueError where all rewards are only watched: nothing would be trained."""
    if not any(reward.weight for reward in config.reward.values()):
        name = next(iter(config.reward))
        raise ValueError(
            f"{len(config.reward)} rewards have weight 0, need at least 1 with another: those are "
            f"only watched; set reward.{name}.weight, e.g. to 1"
        )


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


def _checked_adapter(config: Config, layout: Layout, algorithm: Algorithm) -> ModelAdapter:
    """Return the model's adapter. Raises ValueError where the config does not fit the model."""
    model = Path(config.model.path)
    with named(f"model.path={config.model.path}"):
        check_model_folder(model, config.model.family)

    adapter = build_adapter(model, config.model.family)
    check_model(config, adapter, on_policy=algorithm.on_policy)
    for warning in check_components(config, adapter, has_steps=algorithm.rows == "steps"):
        _warn_once(warning)
    check_heads(adapter.num_heads, sp=layout.sp, tp=layout.tp)
    check_start(config.lora, adapter)
    return adapter


def read_prompts(
    config: Config, path: str, adapter: ModelAdapter, *, key: str = "data.prompts"
) -> list[Prompt]:
    """Load prompts by the config's limits. Where the model is given images, check them too.

    key: of the config, that names the file.
    """
    check_images = None
    if config.rollout.images:
        check_images = partial(_check_images, adapter=adapter, sampling=sampling_of(config.rollout))
    return load_prompts(
        path, max_chars=config.data.max_prompt_chars, check_images=check_images, key=key
    )


def _check_images(files: tuple[str, ...], *, adapter: ModelAdapter, sampling: Sampling) -> None:
    """Raise ValueError where the model or a replica's limits refuse the images of a row."""
    images, sampling = given_images(files, sampling, adapter)
    limits = Limits()
    if len(images) > limits.given_images or not limits.num_requests(sampling.images):
        num_bytes = sum(image.nbytes for image in images)
        raise ValueError(
            f"{len(images)} images of {num_bytes} bytes, a request takes {limits.given_images} "
            f"and {limits.json_bytes * 3 // 4} bytes; give fewer or smaller ones"
        )


def eval_prompts(config: Config, adapter: ModelAdapter) -> list[Prompt]:
    """Return the prompts of eval.prompts, none where eval.every is 0.

    Raises ValueError when eval.num_samples cannot cover their tasks.
    """
    if not config.eval.every:
        return []
    prompts = read_prompts(config, config.eval.prompts, adapter, key="eval.prompts")
    spread(prompts, config.eval.num_samples)
    return prompts
