"""megadiff evaluate MODEL_OR_RUN [key=value …]

Mean rewards over ODE samples with fixed noise identities, through replicas. MODEL is a diffusers pipeline folder; RUN a
run's folder, whose newest whole checkpoint is loaded and pushed to the replicas, and whose config gives the defaults.
Prints one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.data.prompts import load_prompts
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import init_mesh
from megadiff.train.build import build_run, check
from megadiff.train.evaluate import evaluate
from megadiff.train.rollout import sampling_of

MODEL_DEFAULTS = (
    "run.name=evaluate", "train.num_steps=0", "train.prompts_per_step=1", "algorithm.group_size=2", "optim.lr=1",
    "rollout.height=512", "rollout.width=512", "rollout.sde_window_size=1", "rollout.sde_window_range=[0,1]",
    "checkpoint.resume=never",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """0 and the figures on stdout; 2 when something asked for is wrong; 1 when a replica or a reward fails."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    try:
        figures = _evaluate(_config(options), num_samples=options.num_samples)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (AgreedError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


def _config(options: argparse.Namespace) -> Config:
    target: Path = options.target
    is_run = (target / "config.yaml").is_file()
    arguments = [str(target / "config.yaml")] if is_run else [*MODEL_DEFAULTS, f"model.path={target}"]
    arguments += [f"run.dir={target.parent}", f"run.name={target.name}"] if is_run else ["run.dir=runs"]
    arguments += [f"data.prompts={options.prompts}"] if options.prompts else []
    arguments += [f"reward.{name}.type={name}" for name in options.reward]
    return load_config([*arguments, *options.overrides, "track=[]", "parity.mode=off"])


def _evaluate(config: Config, *, num_samples: int) -> dict[str, object]:
    layout, adapter, _ = check(config, world_size=1)
    prompts = load_prompts(Path(config.data.prompts), max_chars=config.data.max_prompt_chars)
    with ExitStack() as stack:
        mesh = init_mesh(layout, config.run.device)
        stack.callback(dist.destroy_process_group)
        run = build_run(config, mesh, adapter, prompts, stack, record=False)
        run.sync.push(run.progress.step)
        figures = evaluate(
            run.fleet,
            run.scorer,
            prompts,
            sampling=sampling_of(config.rollout),
            samples_per_prompt=num_samples,
            seed=config.seed,
            policy_version=run.progress.step,
            mesh=mesh,
        )
    return {
        "step": run.progress.step,
        "num_prompts": len(prompts),
        "num_samples": len(prompts) * num_samples,
        **figures,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="a model folder or a run's folder")
    parser.add_argument("--prompts", help="a prompt file; by default the run's data.prompts")
    parser.add_argument("--reward", action="append", default=[], help="a reward type, e.g. color; may be given again")
    parser.add_argument("--num-samples", type=int, default=1, help="samples per prompt")
    parser.add_argument("overrides", nargs="*", help="key=value, as for megadiff train")
    return parser


if __name__ == "__main__":
    sys.exit(main())
