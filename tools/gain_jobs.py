"""The runs that tools/bench_gain.py is asked for: settings times seeds."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench_machine import is_override

from megadiff.config.load import load_config

DEFAULT_CONFIG = "configs/shapes/flowgrpo.yaml"
ALGORITHMS = Path("configs/shapes/algorithms")  # NAME.yaml is laid over the config
# what is compared, where the config has it and --metric says nothing
PREFERRED = "eval/shapes_strict"
OURS = ("run.dir", "run.name", "seed")  # set here, one value a run


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run that is asked for.

    arguments: of `megadiff train`, without OURS. metric: the score that is compared.
    """

    setting: str
    seed: int
    metric: str
    arguments: list[str]
    runs_folder: Path

    @property
    def name(self) -> str:
        return f"{slug(self.setting)}_seed{self.seed}"

    @property
    def command(self) -> list[str]:
        own = [f"run.dir={self.runs_folder}", f"run.name={self.name}", f"seed={self.seed}"]
        return [sys.executable, "-m", "megadiff.cli.main", "train", *self.arguments, *own]

    @property
    def folder(self) -> Path:
        return self.runs_folder / self.name

    @property
    def log_path(self) -> Path:
        return self.runs_folder / f"{self.name}.log"

    @property
    def result_path(self) -> Path:
        return self.runs_folder / f"{self.name}.json"


def slug(text: str) -> str:
    """Return a setting's name as the name of a folder."""
    return re.sub(r"[^\w.=+-]+", "_", text).strip("_")


def settings_of(varied: Sequence[str]) -> list[list[str]]:
    """Return every combination: ["a=1,2", "b=3,4"] → [["a=1", "b=3"], ["a=1", "b=4"], …].

    Commas within [] do not separate. ValueError: no key=values, or a key twice.
    """
    axes: dict[str, list[str]] = {}
    for each in varied:
        key, equals, values = each.partition("=")
        if not equals or not key or key in axes or not values:
            raise ValueError(
                f"--vary {each!r}: give key=value1,value2,… with every key once, e.g. "
                "optim.lr=5e-5,1e-4"
            )
        axes[key] = [f"{key}={value}" for value in re.split(r",(?![^\[]*\])", values)]
    return [list(setting) for setting in product(*axes.values())]


def setting_name(setting: Sequence[str], configs: Sequence[str]) -> str:
    """Return the algorithm's file and the varied keys without their sections.

    Without any of them it is the names of the config files.
    """
    short = [
        f"{each.partition('=')[0].rpartition('.')[2]}={each.partition('=')[2]}"
        if is_override(each)
        else Path(each).stem
        for each in setting
    ]
    return " ".join(short) or "+".join(Path(config).stem for config in configs)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return every run that is asked for, seeds of one setting together.

    ValueError: a config that does not load or never evaluates, two settings of one name.
    """
    configs = [each for each in options.config if not is_override(each)] or [DEFAULT_CONFIG]
    overrides = [each for each in options.config if is_override(each)]
    for each in (*overrides, *options.vary):
        if each.partition("=")[0] in OURS:
            raise ValueError(
                f"{each!r}: run.dir, run.name and seed are set for every run; use --out and --seeds"
            )
    files = [[str(ALGORITHMS / f"{name}.yaml")] for name in options.algorithms] or [[]]
    asked = [file + varied for file, varied in product(files, settings_of(options.vary))]
    settings = {setting_name(setting, configs): setting for setting in asked}
    if len({slug(name) for name in settings}) < len(asked):
        raise ValueError(
            "two settings would share a name; vary keys and values that differ: "
            f"{', '.join(settings)}"
        )
    runs_folder = options.out.resolve() / "runs"
    return [
        _job(
            name,
            seed,
            # an algorithm's file before the overrides, which are meant for every setting
            sorted([*configs, *overrides, *setting], key=is_override),
            runs_folder=runs_folder,
            metric=options.metric,
        )
        for name, setting in settings.items()
        for seed in dict.fromkeys(options.seeds)
    ]


def _job(name: str, seed: int, arguments: Sequence[str], *, runs_folder: Path, metric: str) -> Job:
    config = load_config([*arguments, "run.name=any"])
    if config.eval.every == 0:
        raise ValueError(f"{name}: eval.every=0, so nothing is measured; give e.g. eval.every=100")
    known = [f"eval/{reward}" for reward in config.reward]
    preferred = [key for key in (metric or PREFERRED, *known) if key in known]
    if not preferred or (metric and metric not in known):
        raise ValueError(
            f"{name}: --metric {metric or PREFERRED} is none of its rewards: "
            f"{', '.join(known) or 'it has none'}"
        )
    return Job(
        setting=name,
        seed=seed,
        metric=preferred[0],
        arguments=list(arguments),
        runs_folder=runs_folder,
    )
