"""megadiff evaluate MODEL_OR_RUN [CONFIG.yaml …] [key=value …]

Draws ODE samples with fixed noise identities through a replica and scores them: mean and 95 %
interval of every reward, by task, with the samples' diversity beside them. MODEL is a diffusers
pipeline folder; its evaluate.yaml, where it has one, says how it is evaluated. RUN is a run's
folder, whose newest checkpoint that loads is evaluated as the run itself does it. With --baseline
a second one draws from the same noise, and the difference is told sample by sample.

A table goes to stdout; evaluation.json, page.html and some images into the --out folder. Exit
codes: 0 done, 1 a replica or a reward failed, 2 something asked for is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from megadiff.checkpoint.base_weights import base_weights
from megadiff.checkpoint.checkpoints import Checkpoints
from megadiff.cli.console import log_to_stderr
from megadiff.cli.evaluate_subject import Subject, check_earlier, resolve, resolve_baseline
from megadiff.config.schema import Config
from megadiff.engines import build_engine
from megadiff.observe.evaluation import (
    RECORD_NAME,
    Comparison,
    Evaluation,
    comparison_to_json,
    to_json,
    write_evaluation,
    write_json,
)
from megadiff.parallel.collectives import AgreedError, agreed
from megadiff.parallel.mesh import Layout, Mesh, init_mesh
from megadiff.process.words import counted
from megadiff.report.evaluation_page import PAGE_NAME, write_evaluation_page
from megadiff.report.evaluation_table import to_text
from megadiff.rewards.score import Scorer
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.train import replicas
from megadiff.train.build_sync import build_sync
from megadiff.train.connect import Connection, connect
from megadiff.train.evaluate import Plan, evaluate
from megadiff.train.judges import Judges, launch_judges
from megadiff.train.run import run_folder
from megadiff.train.run_lock import lock
from megadiff.train.run_replicas import RunReplicas
from megadiff.train.sampling import Redrawable, open_rewards, sampling_of

logger = logging.getLogger(__name__)
COMPARISON_NAME = "comparison.json"
PROGRESS_S = 10.0  # between two log lines, where there is no terminal
_LOCK = threading.Lock()
_MESHES: dict[str, tuple[Any, Mesh]] = {}  # device → the process group and its mesh


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options, config_arguments = parse(argv)
    log_to_stderr()

    try:
        evaluated = evaluate_target(options, config_arguments)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    # Collectives fail together even on one rank, where the replica or a reward is at fault.
    except (AgreedError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return 130

    record = evaluated.folder / RECORD_NAME
    page = evaluated.folder / PAGE_NAME
    evaluation = evaluated.evaluation
    comparison = evaluated.comparison
    if options.json:
        sys.stdout.write(_json_text(record, page, evaluation, comparison))
    else:
        sys.stdout.write(f"{to_text(evaluation, comparison)}\n{record}\n{page}\n")

    return 0


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Hold an evaluation, and its comparison with a baseline where there was one.

    folder: where evaluation.json and page.html are.
    """

    evaluation: Evaluation
    comparison: Comparison | None
    folder: Path


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's options, and the arguments that make its config."""
    return _parser().parse_known_args(argv)


def evaluate_target(options: argparse.Namespace, config_arguments: list[str]) -> Evaluated:
    """Evaluate what parse() was given, and write the record and the page.

    Raises ValueError where something asked for is wrong, and AgreedError or OSError where a replica
    or a reward failed.
    """
    comparison = None
    baseline = None
    subject, plan = resolve(options, config_arguments)
    if options.baseline:
        baseline = resolve_baseline(
            subject, options.baseline, config_arguments, force=options.force
        )

    with ExitStack() as stack:
        # Two would end each other's replicas; of a run's folder as well.
        advice = "end it or wait for it, or give this one --out ANOTHER"
        lock(subject.folder, stack, wait_s=0, advice=advice)
        for evaluated in (subject, baseline):
            if evaluated:  # the other one may have ended now
                check_earlier(evaluated.folder, force=options.force)
        scorer = stack.enter_context(closing(Scorer(subject.config.reward)))
        scorer.validate([prompt for prompt, _ in plan])
        judges = _open_rewards(scorer, subject, stack)

        if baseline:
            # First: what is compared with it comes last, and stays on the screen.
            before = _evaluate(baseline, subject.config, scorer, judges, plan)
        evaluation = _evaluate(subject, subject.config, scorer, judges, plan)
        if baseline:
            comparison = Comparison(evaluation=evaluation, baseline=before)
            write_json(subject.folder / COMPARISON_NAME, comparison_to_json(comparison))

        write_evaluation_page(
            subject.folder,
            evaluation,
            comparison,
            baseline_folder=baseline.folder if baseline else None,
        )
    return Evaluated(evaluation=evaluation, comparison=comparison, folder=subject.folder)


def _open_rewards(scorer: Scorer, subject: Subject, stack: ExitStack) -> Judges:
    """Start the judges that the rewards ask, and load the rewards."""
    mesh = one_rank_mesh(subject)
    judges = launch_judges(subject.config, mesh, subject.folder, stack)
    judges.wait()
    open_rewards(scorer, judges.urls, sampling_of(subject.config.rollout), mesh=mesh)
    return judges


def one_rank_mesh(subject: Subject) -> Mesh:
    """Return the mesh of this process alone, as FIXED sets the config's section parallel."""
    device_type = subject.config.run.device
    # Groups and their threads live as long as the process, and a notebook may ask for many, in
    # several threads.
    with _LOCK:
        world, mesh = _MESHES.get(device_type, (None, None))
        # A run in this process may have ended them: WORLD is another then, or None.
        if mesh is None or world is not dist.group.WORLD:
            layout = Layout(world_size=1, dp=1, dp_replicate=1, sp=1, tp=1)
            mesh = init_mesh(layout, device_type)
            _MESHES[device_type] = (dist.group.WORLD, mesh)
        return mesh


def _evaluate(
    subject: Subject, config: Config, scorer: Scorer, judges: Judges, plan: Plan
) -> Evaluation:
    """Start a replica of the subject, evaluate it and write its record. config: how to sample."""
    mesh = one_rank_mesh(subject)
    start_s = time.monotonic()

    with ExitStack() as stack:
        connection, step = connect_replicas(subject, mesh, judges, stack)
        total = sum(len(indices) for _, indices in plan)
        outcome = evaluate(
            connection.fleet,
            partial(_finish, mesh=mesh),
            scorer,
            plan,
            config,
            adapter=subject.adapter,
            policy_version=step,
            mesh=mesh,
            model=str(subject.target),
            on_samples=stack.enter_context(_sample_progress(total, str(subject.target))),
        )

    seconds = time.monotonic() - start_s
    logger.info(
        "%s: %s, %.1f s with the start of its replica",
        subject.target,
        counted(total, "sample"),
        seconds,
    )

    # Of a --force: the comparison is of the record that is replaced now.
    (subject.folder / COMPARISON_NAME).unlink(missing_ok=True)
    write_evaluation(
        subject.folder,
        outcome.evaluation,
        outcome.images,
        frames_per_s=subject.adapter.frames_per_s,
    )

    return outcome.evaluation


def connect_replicas(
    subject: Subject, mesh: Mesh, judges: Judges, stack: ExitStack
) -> tuple[Connection, int | None]:
    """Start the subject's replicas, or find them in a registry; they end when `stack` closes.

    Returns them, and the step of a run's checkpoint that they hold by now; None for a model.
    """
    processes = replicas.launch(subject.config, mesh, subject.adapter, subject.folder, stack)
    connection = connect(subject.config, mesh, subject.folder, processes, stack)
    step = _push(subject, mesh, connection, judges) if subject.is_run else None

    return connection, step


def _finish(draw: Redrawable, *, here: bool, mesh: Mesh) -> None:
    """Run an evaluation's draws, which one lost replica ends: the engine is gone by then."""

    def run() -> None:
        if not draw.run():
            raise ReplicaDied("no replica is left; look at its log, and evaluate again")

    agreed(run, mesh.cpu_group, here=here)


def _push(subject: Subject, mesh: Mesh, connection: Connection, judges: Judges) -> int:
    """Load the run's checkpoint, bring the replica to it and return its step."""
    config = subject.config
    folder = run_folder(config)
    engine = build_engine(config, mesh, subject.adapter)
    base = base_weights(config, subject.adapter, mesh)
    progress = Checkpoints(folder, config, mesh, base=base).load(engine, lambda _: None)

    # A run with algorithm.ema_decay exports its averaged weights, so they are evaluated.
    with engine.averaged():
        sync_of = partial(build_sync, engine)
        RunReplicas(connection, config, mesh, judges, build_sync=sync_of).wake(progress.step)
    return progress.step


def _json_text(
    record: Path, page: Path, evaluation: Evaluation, comparison: Comparison | None
) -> str:
    """Write the record without its samples, the comparison, and the paths of record and page."""
    answer = to_json(evaluation)
    # Thousands of rows, which stand in the record's file.
    del answer["samples"]
    if comparison:
        answer["comparison"] = comparison_to_json(comparison)
    return json.dumps({**answer, "record": str(record), "page": str(page)}) + "\n"


@contextmanager
def _sample_progress(total: int, name: str) -> Iterator[Callable[[int], None]]:
    """Count samples that arrived: in a bar on a terminal, else in a log line every PROGRESS_S."""
    # disable=None: no bar where stderr is no terminal.
    bar = tqdm(
        total=total, desc=name, unit="sample", file=sys.stderr, disable=None, dynamic_ncols=True
    )

    num_done = 0
    last_s = time.monotonic()

    def add(count: int) -> None:
        nonlocal num_done, last_s
        num_done += count
        bar.update(count)
        # A disabled bar counts nothing itself.
        if bar.disable and time.monotonic() - last_s > PROGRESS_S:
            last_s = time.monotonic()
            logger.info("%s: %d of %d samples", name, num_done, total)

    with bar:
        yield add


def _folder(text: str) -> Path:
    """Return a path with a name, which '.' has not."""
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
        "--prompts",
        metavar="FILE",
        help="by default the prompts that are named behind MODEL_OR_RUN, else its eval.prompts, "
        "else its data.prompts",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME",
        help="instead of the config's rewards: one of them, a type such as color, or "
        "module:Class; may be given again",
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
        "--force", action="store_true", help="replace an earlier evaluation in that folder"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout in place of the table"
    )

    return parser
