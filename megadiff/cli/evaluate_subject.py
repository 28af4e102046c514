"""Resolve what `megadiff evaluate` was asked for: a model or a run, its config and its samples.

Everything that can be refused is refused here, with ValueError, before a replica starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from megadiff.algorithms import build_algorithm
from megadiff.checkpoint.run_folders import is_checkpoint, whole_looking
from megadiff.config.load import last_named, load_config, override
from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import Config
from megadiff.config.validate import validate
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.observe.evaluation import IMAGES, RECORD_NAME
from megadiff.report.evaluation_page import PAGE_NAME
from megadiff.tensors.lora_files import has_loras
from megadiff.train.check import read_prompts
from megadiff.train.check_judges import check_judges
from megadiff.train.evaluate import Plan, eval_sampling, spread
from megadiff.train.run import run_folder

WRITTEN = (IMAGES, PAGE_NAME)  # what an evaluation writes beside its record
# In a pipeline folder: size, steps, prompts, rewards, … of its evaluation.
MODEL_CONFIG = "evaluate.yaml"
# Keys that training needs and evaluation does not look at, and a size.
MODEL_DEFAULTS = [
    "run.dir=runs",
    "train.num_steps=0",
    "train.prompts_per_step=1",
    "algorithm.group_size=2",
    "optim.lr=1",
    "rollout.height=512",
    "rollout.width=512",
    "rollout.sde_window_size=1",
    "rollout.sde_window_range=[0,1]",
]
# In place of the run's own.
RUN_DEFAULTS = ["rollout.num_replicas=0", "checkpoint.resume=auto", "sync.transport=http"]
# Evaluation is one process beside one replica, whatever the run was.
FIXED = [
    "parallel.dp=0",
    "parallel.dp_replicate=1",
    "parallel.sp=1",
    "parallel.tp=1",
    "engine.fp8=none",
    "rollout.mode=colocated",
    "train.staleness=0",  # colocated replicas cannot draw ahead, and nothing trains here
    "sync.folder=''",  # a run may be writing there
    "track=[]",
    "eval.every=0",
    "lora.start=''",  # the checkpoint's LoRA comes over it
    "lora.shared_base=never",  # the engine is gone while the replica samples
]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model or run to evaluate.

    target: as the user named it. config: resolved for it. folder: where its record goes.
    """

    target: Path
    config: Config
    adapter: ModelAdapter
    folder: Path

    @property
    def is_run(self) -> bool:
        return _is_run(self.target)


def resolve(options: argparse.Namespace, config_arguments: list[str]) -> tuple[Subject, Plan]:
    """Return the subject and the plan of its samples. options: of the command."""
    target: Path = options.target
    config = config_of(target, config_arguments)
    prompts_file = _prompts_file(config, options, config_arguments)
    config = _with_options(config, options, prompts=prompts_file)
    if not config.reward:
        raise ValueError(
            "no reward to score with; give --reward NAME, e.g. --reward color, or "
            "reward.<name>.type=TYPE"
        )

    validate(config, dp=1, on_policy=build_algorithm(config.algorithm).on_policy)
    check_judges(config, all_used=False)  # --reward may leave some without use
    adapter = checked_adapter(config)

    prompts = read_prompts(config, config.eval.prompts, adapter, key="eval.prompts")
    plan = spread(prompts, config.eval.num_samples)
    adapter.check_prompts(prompts)

    folder = options.out or (target / "evaluate" if _is_run(target) else run_folder(config))
    check_earlier(folder, force=options.force)
    return Subject(target=target, config=config, adapter=adapter, folder=folder), plan


def check_earlier(folder: Path, *, force: bool) -> None:
    """Raise ValueError where the folder holds what nobody wants to be replaced."""
    if force:
        return
    if (folder / RECORD_NAME).exists():
        raise ValueError(
            f"{folder} holds an earlier evaluation; keep it with --out ANOTHER, or give --force to "
            "replace it"
        )
    # without a record they are no evaluation's, but for one that was killed
    others = [name for name in WRITTEN if (folder / name).exists()]
    if others:
        raise ValueError(
            f"{folder} holds {', '.join(others)}, but no {RECORD_NAME}; an evaluation would "
            "replace them, so give --out ANOTHER, or --force"
        )


def resolve_baseline(
    subject: Subject, target: Path, config_arguments: list[str], *, force: bool
) -> Subject:
    """Return the baseline, which draws from the subject's noise.

    A plain pipeline folder is sampled as the subject is. Raises ValueError where the baseline's
    own settings need other noise.
    """
    config = config_of(target, config_arguments)
    if not _is_run(target) and not (target / MODEL_CONFIG).is_file():
        model = replace(subject.config.model, path=str(target))
        run = replace(config.run, device=subject.config.run.device)
        config = replace(subject.config, run=run, model=model)

    adapter = checked_adapter(config)
    ours = eval_sampling(subject.config)
    theirs = eval_sampling(config)
    our_shape = subject.adapter.latents_shape(ours)
    their_shape = adapter.latents_shape(theirs)

    if (ours.size_text, our_shape) != (theirs.size_text, their_shape):
        raise ValueError(
            f"{subject.target} draws {ours.size_text} from latents of {list(our_shape)}, the "
            f"baseline {target} {theirs.size_text} from {list(their_shape)}: the same noise "
            "needs the same; set rollout.height and rollout.width, or take another baseline"
        )

    folder = subject.folder / "baseline"
    check_earlier(folder, force=force)
    return Subject(target=target, config=config, adapter=adapter, folder=folder)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def config_of(target: Path, config_arguments: list[str]) -> Config:
    """Return the target's own config, then the arguments, then what evaluation needs.

    Raises ValueError for a target that is neither a model nor a run with a checkpoint.
    """
    if not target.is_dir():
        problem = "is a file" if target.exists() else "does not exist"
        raise ValueError(f"{target} {problem}; give a diffusers pipeline folder or a run's folder")

    if is_checkpoint(target):
        in_run = target.resolve().parent.name == "checkpoints"
        run = f"the run, {target.parent.parent}," if in_run else "a run"
        raise ValueError(
            f"{target} is a checkpoint: give {run} and for this step checkpoint.resume={target}"
        )
    # A pipeline may have one beside it.
    if has_loras(target) and not (target / "model_index.json").is_file():
        raise ValueError(
            f"{target} is a LoRA, which draws nothing alone: convert it first, by "
            f"`megadiff convert {target} OUT --to merged --base MODEL`, and give OUT"
        )

    if not _is_run(target):
        model_config = target / MODEL_CONFIG
        base = MODEL_DEFAULTS + ([str(model_config)] if model_config.is_file() else [])
        # A recipe's name is that of a run, in whose folder this one has no business.
        named = any(argument.startswith("run.name=") for argument in config_arguments)
        name = [] if named else [override("run.name", f"evaluate_{target.name}")]
        model = override("model.path", str(target))
        # FIXED comes last, as later layers win: no argument can change it.
        return load_config([*base, model, *config_arguments, *name, *FIXED])

    # Its own folder, whatever its name looks like: 010 is not 8.
    name = [override("run.dir", str(target.parent)), override("run.name", target.name)]
    base = [str(target / "config.yaml"), *name, *RUN_DEFAULTS]
    config = load_config([*base, *config_arguments, *FIXED])

    if config.checkpoint.resume == "auto" and not whole_looking(target / "checkpoints"):
        raise ValueError(
            f"{target} holds no checkpoint; evaluate the model it started from, {config.model.path}"
        )

    return config


def _prompts_file(config: Config, options: argparse.Namespace, config_arguments: list[str]) -> str:
    """Return the prompts that were asked for here, else those that the target is evaluated on."""
    # data.prompts=mine.txt means these, whatever eval.prompts the run or a file before it has.
    named = last_named(config_arguments, ("eval.prompts", "data.prompts"))
    chosen = attrgetter(named)(config) if named else ""
    prompts = options.prompts or chosen or config.eval.prompts or config.data.prompts
    if not prompts:
        raise ValueError("no prompts to sample; give --prompts FILE, or eval.prompts=FILE")

    # A model's evaluate.yaml names a file of its own folder.
    beside_model = options.target / prompts
    is_beside = not Path(prompts).exists() and beside_model.exists()
    return str(beside_model) if is_beside else prompts


def _with_options(config: Config, options: argparse.Namespace, *, prompts: str) -> Config:
    """Return the config with the prompts, --num-samples and --reward over its own keys."""
    num_samples = config.eval.num_samples if options.num_samples is None else options.num_samples
    if options.num_samples is not None and num_samples < 1:
        raise ValueError(f"--num-samples={num_samples} < 1; leave it out for one sample a prompt")

    rewards = named_rewards(options.reward, config.reward)
    return replace(
        config,
        eval=replace(config.eval, prompts=prompts, num_samples=num_samples),
        data=replace(config.data, prompts=config.data.prompts or prompts),
        reward=rewards or config.reward,
    )


def named_rewards(
    kinds: Sequence[str], configured: Mapping[str, RewardConfig]
) -> dict[str, RewardConfig]:
    """Return name → reward of types, module:Class and names of configured ones.

    Raises ValueError where two have one name: only one of them would score.
    """
    rewards: dict[str, RewardConfig] = {}
    kind_of: dict[str, str] = {}
    for kind in kinds:
        name = kind.rpartition(":")[2]  # of module:Class, the class
        if kind_of.get(name, kind) != kind:
            raise ValueError(
                f"rewards {kind_of[name]} and {kind} are both named {name}; give one of them, or "
                "reward.<name>.type=TYPE in the config for each"
            )
        kind_of[name] = kind
        rewards[name] = configured.get(name) or RewardConfig(type=kind)

    return rewards


def checked_adapter(config: Config) -> ModelAdapter:
    """Return the adapter of the config's model. Raises ValueError for what it cannot sample."""
    model = Path(config.model.path)
    check_model_folder(model, config.model.family)
    adapter = build_adapter(model, config.model.family)
    adapter.validate(eval_sampling(config))
    return adapter
