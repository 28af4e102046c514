"""megadiff evaluate MODEL_OR_RUN [key=value …]

Mean rewards over ODE samples with fixed noise identities, through a replica. MODEL is a diffusers pipeline folder; RUN a
run's folder, whose newest checkpoint that loads is pushed to the replica, and whose config gives the defaults. Prints one
JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from megadiff.cli.console import leave, log_to_stderr
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.engines import build_engine
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import Mesh, init_mesh
from megadiff.rewards.score import Scorer
from megadiff.rollout.fleet import Fleet
from megadiff.rollout.processes import stop_all
from megadiff.train import replicas
from megadiff.train.build import build_sync, check, run_folder
from megadiff.train.checkpoint import Checkpoints
from megadiff.train.evaluate import evaluate
from megadiff.train.rollout import sampling_of

MODEL_DEFAULTS = (
    *("run.dir=runs", "train.num_steps=0", "train.prompts_per_step=1", "algorithm.group_size=2", "optim.lr=1"),
    *("rollout.height=512", "rollout.width=512", "rollout.sde_window_size=1", "rollout.sde_window_range=[0,1]"),
)
ONE_PROCESS = (
    *("parallel.dp=0", "parallel.dp_replicate=1", "parallel.sp=1", "parallel.tp=1", "rollout.mode=colocated"),
    *("track=[]", "rollout.num_replicas=1"),
)


def main(argv: list[str] | None = None) -> int:
    """0 and the figures on stdout; 2 when something asked for is wrong; 1 when a replica or a reward fails."""
    options, overrides = _parser().parse_known_args(argv)
    log_to_stderr()
    try:
        config = _config(options, overrides)
        layout, adapter, prompts = check(config, world_size=1)
        mesh = init_mesh(layout, config.run.device)
        with ExitStack() as stack:
            folder = run_folder(config) / "evaluate"
            processes = replicas.launch(config, mesh, folder)
            stack.callback(stop_all, processes)
            fleet = stack.enter_context(replicas.connect(config, mesh, folder, processes))
            step = _push(config, mesh, adapter, fleet) if _is_run(options.target) else None
            figures = evaluate(
                fleet,
                stack.enter_context(closing(Scorer(config.reward))),
                prompts,
                sampling=sampling_of(config.rollout),
                samples_per_prompt=options.num_samples,
                seed=config.seed,
                policy_version=step,
                mesh=mesh,
            )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (AgreedError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    counts = {"step": step or 0, "num_prompts": len(prompts), "num_samples": len(prompts) * options.num_samples}
    sys.stdout.write(json.dumps(counts | figures) + "\n")
    return 0


def _push(config: Config, mesh: Mesh, adapter: ModelAdapter, fleet: Fleet) -> int:
    """Load the run's checkpoint and bring the replica to it; returns its step."""
    engine = build_engine(config, mesh, adapter)
    progress = Checkpoints(run_folder(config), config, mesh).load(engine, lambda _: None)
    build_sync(config, mesh, adapter, engine, fleet).push(progress.step)
    return progress.step


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _config(options: argparse.Namespace, overrides: list[str]) -> Config:
    target: Path = options.target
    if _is_run(target):
        base = [str(target / "config.yaml"), f"run.dir={target.parent}", f"run.name={target.name}"]
    else:
        base = [*MODEL_DEFAULTS, f"run.name=evaluate_{target.name}", f"model.path={target}"]
    base += [f"data.prompts={options.prompts}"] if options.prompts else []
    base += [f"reward.{name}.type={name}" for name in options.reward]
    return load_config([*base, *overrides, *ONE_PROCESS])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff evaluate",
        usage="%(prog)s MODEL_OR_RUN [options] [key=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", type=Path, metavar="MODEL_OR_RUN")
    parser.add_argument("--prompts", help="a prompt file; by default the run's data.prompts")
    parser.add_argument("--reward", action="append", default=[], help="a reward type, e.g. color; may be given again")
    parser.add_argument("--num-samples", type=int, default=1, help="samples per prompt")
    return parser


if __name__ == "__main__":
    leave(main())
