"""megadiff evaluate MODEL_OR_RUN [CONFIG.yaml …] [key=value …]

Draws ODE samples with fixed noise identities through a replica and scores them: mean and 95 % interval of every reward,
by task, with the samples' diversity beside them. MODEL is a diffusers pipeline folder; its evaluate.yaml, where it has
one, says how it is evaluated. RUN is a run's folder, whose newest checkpoint that loads is evaluated as the run itself
does it. With --baseline a second one draws from the same noise, and the difference is told sample by sample.

A table goes to stdout; evaluation.json, page.html and some images into the --out folder. Exit codes: 0 done, 1 a replica
or a reward failed, 2 something asked for is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from megadiff.checkpoint.checkpoints import Checkpoints, base_weights, whole_looking
from megadiff.cli.console import leave, log_to_stderr
from megadiff.config.load import load_config
from megadiff.config.schema import Config, RewardConfig
from megadiff.config.validate import validate
from megadiff.engines import build_engine
from megadiff.models.adapter import ModelAdapter
from megadiff.models.registry import build_adapter, check_model_folder
from megadiff.observe.evaluation import (
    RECORD_NAME,
    Comparison,
    Evaluation,
    comparison_to_json,
    to_json,
    write_evaluation,
    write_json,
)
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from megadiff.report.evaluation_page import PAGE_NAME, write_evaluation_page
from megadiff.report.evaluation_table import to_text
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import stop_all
from megadiff.train import replicas
from megadiff.train.build import build_sync, read_prompts, run_folder
from megadiff.train.evaluate import Plan, eval_sampling, evaluate, groups_in_a_call, spread
from megadiff.train.sampling import check_call
from megadiff.types import Sampling

logger = logging.getLogger(__name__)
MODEL_CONFIG = (
    "evaluate.yaml"  # in a pipeline folder: size, steps, prompts, rewards, … of its evaluation
)
COMPARISON_NAME = "comparison.json"
MODEL_DEFAULTS = (  # what training needs and evaluation does not look at, and a size
    *(
        "run.dir=runs",
        "train.num_steps=0",
        "train.prompts_per_step=1",
        "algorithm.group_size=2",
        "optim.lr=1",
    ),
    *(
        "rollout.height=512",
        "rollout.width=512",
        "rollout.sde_window_size=1",
        "rollout.sde_window_range=[0,1]",
    ),
)
RUN_DEFAULTS = (  # in place of the run's own; its sync.folder belongs to the run
    "rollout.num_replicas=0",
    "checkpoint.resume=auto",
    "sync.transport=http",
)
FIXED = (
    *(
        "parallel.dp=0",
        "parallel.dp_replicate=1",
        "parallel.sp=1",
        "parallel.tp=1",
        "engine.fp8=none",
    ),
    "rollout.mode=colocated",
    *("track=[]", "eval.every=0"),
)
PROGRESS_S = 10.0  # between two log lines, where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated. target: as the user named it. config: resolved for it. folder: where its record goes."""

    target: Path
    config: Config
    adapter: ModelAdapter
    folder: Path


def main(argv: list[str] | None = None) -> int:
    """The exit code; see the module's text."""
    options, config_arguments = _parser().parse_known_args(argv)
    log_to_stderr()
    try:
        subject, plan = _subject(options, config_arguments)
        with closing(Scorer(subject.config.reward)) as scorer:
            scorer.validate([prompt for prompt, _ in plan])
            baseline = _baseline(subject, options, config_arguments) if options.baseline else None
            evaluation, comparison = _evaluate_all(subject, baseline, plan, scorer)
        _write(subject, baseline, evaluation, comparison)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (AgreedError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    text = _json_text if options.json else _text
    sys.stdout.write(text(subject.folder, evaluation, comparison))
    return 0


def _subject(options: argparse.Namespace, config_arguments: list[str]) -> tuple[Subject, Plan]:
    """Everything that can be refused before a replica starts. ValueError."""
    target: Path = options.target
    config = _with_options(_config(target, config_arguments), options)
    if not config.reward:
        raise ValueError(
            "no reward to score with; give --reward NAME, e.g. --reward color, or reward.<name>.type=TYPE"
        )
    validate(config, dp=1)
    adapter = _checked_adapter(config)
    prompts = read_prompts(config, config.eval.prompts)
    plan, sampling = spread(prompts, config.eval.num_samples), eval_sampling(config)
    num_groups = groups_in_a_call(plan, sampling, batch_size=config.rollout.batch_size)
    check_call(sampling, num_groups, what="the evaluation")
    adapter.check_prompts(prompts)
    folder = options.out or (target / "evaluate" if _is_run(target) else run_folder(config))
    return Subject(target=target, config=config, adapter=adapter, folder=folder), plan


def _baseline(
    subject: Subject, options: argparse.Namespace, config_arguments: list[str]
) -> Subject:
    """A plain pipeline folder is sampled as the subject is; ValueError when another's own settings need other noise."""
    target: Path = options.baseline
    config = _config(target, config_arguments)
    if not _has_config(target):
        run = replace(config.run, device=subject.config.run.device)
        config = replace(
            subject.config, run=run, model=replace(subject.config.model, path=str(target))
        )
    adapter = _checked_adapter(config)
    ours, theirs = eval_sampling(subject.config), eval_sampling(config)
    sizes = [(each.height, each.width, each.num_frames) for each in (ours, theirs)]
    shapes = [subject.adapter.latents_shape(ours), adapter.latents_shape(theirs)]
    if sizes[0] != sizes[1] or shapes[0] != shapes[1]:
        raise ValueError(
            f"{subject.target} draws {_size_text(ours)} from latents of {list(shapes[0])}, the baseline {target} "
            f"{_size_text(theirs)} from {list(shapes[1])}: the same noise needs the same; set rollout.height and "
            "rollout.width, or take another baseline"
        )
    return Subject(
        target=target, config=config, adapter=adapter, folder=subject.folder / "baseline"
    )


def _size_text(sampling: Sampling) -> str:
    return f"{sampling.width}x{sampling.height}" + (
        f"x{sampling.num_frames}" if sampling.num_frames > 1 else ""
    )


def _evaluate_all(
    subject: Subject, baseline: Subject | None, plan: Plan, scorer: Scorer
) -> tuple[Evaluation, Comparison | None]:
    """The baseline first: what is compared with it comes last, and stays on the screen."""
    before = _evaluate(baseline, subject.config, scorer, plan) if baseline else None
    evaluation = _evaluate(subject, subject.config, scorer, plan)
    return evaluation, Comparison(evaluation=evaluation, baseline=before) if before else None


def _evaluate(subject: Subject, config: Config, scorer: Scorer, plan: Plan) -> Evaluation:
    """One replica of the subject, started and stopped here. config: how to sample. Writes the record."""
    parallel = subject.config.parallel
    layout = resolve_layout(
        dp=parallel.dp,
        sp=parallel.sp,
        tp=parallel.tp,
        dp_replicate=parallel.dp_replicate,
        world_size=1,
    )
    mesh = init_mesh(layout, subject.config.run.device)
    start_s = time.monotonic()
    with ExitStack() as stack:
        processes = replicas.launch(subject.config, mesh, subject.folder)
        stack.callback(stop_all, processes)
        fleet = stack.enter_context(
            replicas.connect(subject.config, mesh, subject.folder, processes)
        )
        step = _push(subject, mesh, fleet) if _is_run(subject.target) else None
        total = sum(len(indices) for _, indices in plan)
        outcome = evaluate(
            fleet,
            scorer,
            plan,
            sampling=eval_sampling(config),
            seed=config.seed,
            batch_size=config.rollout.batch_size,
            policy_version=step,
            mesh=mesh,
            model=str(subject.target),
            on_samples=stack.enter_context(_Progress(total, str(subject.target))),
        )
    logger.info(
        "%s: %d samples, %.1f s with the start of its replica",
        subject.target,
        total,
        time.monotonic() - start_s,
    )
    write_evaluation(
        subject.folder,
        outcome.evaluation,
        outcome.images,
        frames_per_s=subject.adapter.frames_per_s,
    )
    return outcome.evaluation


def _push(subject: Subject, mesh: Mesh, fleet: Fleet) -> int:
    """Load the run's checkpoint and bring the replica to it; returns its step."""
    config, folder = subject.config, run_folder(subject.config)
    engine = build_engine(config, mesh, subject.adapter)
    base = base_weights(config, subject.adapter, mesh)
    progress = Checkpoints(folder, config, mesh, base=base).load(engine, lambda _: None)
    with engine.averaged():
        sync = build_sync(config, mesh, subject.adapter, engine, fleet)
        replicas.RunReplicas(fleet, sync, config, mesh).wake(progress.step)
    return progress.step


def _write(
    subject: Subject,
    baseline: Subject | None,
    evaluation: Evaluation,
    comparison: Comparison | None,
) -> None:
    """Beside the records: the comparison and the page."""
    if comparison:
        write_json(subject.folder / COMPARISON_NAME, comparison_to_json(comparison))
    baseline_folder = baseline.folder if baseline else None
    write_evaluation_page(subject.folder, evaluation, comparison, baseline_folder=baseline_folder)


def _text(folder: Path, evaluation: Evaluation, comparison: Comparison | None) -> str:
    return f"{to_text(evaluation, comparison)}\n{folder / RECORD_NAME}\n{folder / PAGE_NAME}\n"


def _json_text(folder: Path, evaluation: Evaluation, comparison: Comparison | None) -> str:
    """The record without its samples, the comparison, and where the whole is."""
    record = {key: value for key, value in to_json(evaluation).items() if key != "samples"}
    record |= {"comparison": comparison_to_json(comparison)} if comparison else {}
    return (
        json.dumps(record | {"record": str(folder / RECORD_NAME), "page": str(folder / PAGE_NAME)})
        + "\n"
    )


class _Progress:
    """Samples that have arrived: a bar on a terminal, else a log line every PROGRESS_S."""

    def __init__(self, total: int, name: str) -> None:
        self._bar = tqdm(
            total=total, desc=name, unit="sample", file=sys.stderr, disable=None, dynamic_ncols=True
        )
        self._name, self._total, self._count, self._last_s = name, total, 0, time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, count: int) -> None:
        self._count += count
        self._bar.update(count)
        if self._bar.disable and time.monotonic() - self._last_s > PROGRESS_S:
            self._last_s = time.monotonic()
            logger.info("%s: %d of %d samples", self._name, self._count, self._total)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _has_config(folder: Path) -> bool:
    return _is_run(folder) or (folder / MODEL_CONFIG).is_file()


def _config(target: Path, config_arguments: list[str]) -> Config:
    """The target's own config, then the arguments, then what evaluation needs."""
    if not target.is_dir():
        raise ValueError(
            f"{target} does not exist; give a diffusers pipeline folder or a run's folder"
        )
    own = target / MODEL_CONFIG
    if _is_run(target):
        base = [
            str(target / "config.yaml"),
            f"run.dir={target.parent}",
            f"run.name={target.name}",
            *RUN_DEFAULTS,
        ]
    else:
        base = [
            *MODEL_DEFAULTS,
            f"run.name=evaluate_{target.name}",
            *([str(own)] if own.is_file() else []),
        ]
        base.append(f"model.path={target}")
    config = load_config([*base, *config_arguments, *FIXED])
    if (
        _is_run(target)
        and config.checkpoint.resume == "auto"
        and not whole_looking(target / "checkpoints")
    ):
        raise ValueError(
            f"{target} holds no checkpoint; evaluate the model it started from, {config.model.path}"
        )
    return config


def _with_options(config: Config, options: argparse.Namespace) -> Config:
    """--prompts, --num-samples and --reward over the config's; --reward alone decides which rewards there are."""
    prompts = options.prompts or config.eval.prompts or config.data.prompts
    if not prompts:
        raise ValueError("no prompts to sample; give --prompts FILE, or eval.prompts=FILE")
    beside_model = options.target / prompts
    prompts = str(beside_model) if not Path(prompts).exists() and beside_model.exists() else prompts
    num_samples = config.eval.num_samples
    if options.num_samples is not None:
        num_samples = options.num_samples
        if num_samples < 1:
            raise ValueError(
                f"--num-samples={num_samples} < 1; leave it out for one sample a prompt"
            )
    asked = {kind.rpartition(":")[2]: kind for kind in options.reward}
    rewards = {
        name: config.reward.get(name) or RewardConfig(type=kind) for name, kind in asked.items()
    }
    return replace(
        config,
        eval=replace(config.eval, prompts=prompts, num_samples=num_samples),
        data=replace(config.data, prompts=config.data.prompts or prompts),
        reward=rewards or config.reward,
    )


def _checked_adapter(config: Config) -> ModelAdapter:
    model = Path(config.model.path)
    check_model_folder(model)
    adapter = build_adapter(model)
    adapter.validate(eval_sampling(config))
    return adapter


def _folder(text: str) -> Path:
    """A path with a name, which '.' has not."""
    return Path(text) if Path(text).name not in ("", "..") else Path(text).resolve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff evaluate",
        usage="%(prog)s MODEL_OR_RUN [options] [CONFIG.yaml …] [key=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", type=_folder, metavar="MODEL_OR_RUN")
    parser.add_argument(
        "--prompts", metavar="FILE", help="by default eval.prompts, else data.prompts"
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME",
        help="instead of the config's rewards: one of them, a type such as color, or module:Class; may be given again",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        metavar="N",
        help="in all, shared by tasks and prompts; default: one a prompt",
    )
    parser.add_argument(
        "--baseline", type=_folder, metavar="MODEL_OR_RUN", help="compare with it on the same noise"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: RUN/evaluate, or runs/evaluate_<model>"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout in place of the table"
    )
    return parser


if __name__ == "__main__":
    leave(main())
