"""Check the config's section `judge` before a server starts, and turn it into command lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadiff.config.rewards import JudgeConfig
from megadiff.config.schema import Config
from megadiff.process.doors import near

# In a model's config.json, of what turns pictures into tokens.
PICTURE_KEYS = ("vision", "visual", "image", "img", "mm_")
# Models that take pictures although no key says so.
PICTURE_MODELS = ("ChameleonForConditionalGeneration", "MolmoForCausalLM")
# Options that the run gives itself, or that would lock it out.
TAKEN = set(
    "model served-model-name host port uds api-key ssl-keyfile root-path tensor-parallel-size "
    "enable-sleep-mode".split()
)


def used_judges(config: Config) -> dict[str, list[str]]:
    """Return judge → the rewards that ask it, by their argument `judge`.

    Raises ValueError for one that the config has not.
    """
    used: dict[str, list[str]] = {}
    for name, reward in config.reward.items():
        judge = _judge_of(reward.args)
        if not isinstance(judge, str):
            raise ValueError(f"reward.{name}.args.judge={judge!r} must be one name")
        if judge and judge not in config.judge:
            raise ValueError(
                f"reward.{name}.args.judge={judge} is not in the section judge"
                f"{near(str(judge), config.judge)}; it has: {', '.join(config.judge) or 'nothing'}"
            )
        if judge:
            used.setdefault(judge, []).append(name)
    return used


def _judge_of(args: Mapping[str, Any]) -> Any:
    """Return the judge that a reward, or the one that it applies to frames, names; "" for none."""
    inner = args.get("args")
    if "judge" not in args and isinstance(inner, Mapping):
        return _judge_of(inner)
    return args.get("judge", "")


def check_judges(config: Config, *, all_used: bool = True) -> None:
    """Raise ValueError for a judge that cannot start. all_used: or that no reward asks."""
    used = used_judges(config)
    for name, judge in config.judge.items():
        if name in used:
            _check_gpus(name, judge)
            _check_model(name, Path(judge.model))
            _options(name, judge)
        elif all_used:
            raise ValueError(
                f"judge.{name}: no reward asks it; set reward.<name>.args.judge={name} "
                f"(type=vlm), or remove judge.{name}"
            )


def server_command(name: str, judge: JudgeConfig, *, port: int, parent_pid: int) -> list[str]:
    """Return the command line of one server, vLLM's, on loopback."""
    command = [sys.executable, "-m", "megadiff.process.lifeline", str(parent_pid)]
    # Not `vllm serve`, which looks for a distribution of vLLM's name: on CPUs it has another.
    command += ["vllm.entrypoints.openai.api_server", "--model", judge.model]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tensor-parallel-size", str(judge.tp)]
    for option, value in _options(name, judge).items():
        if value is False or value is None:
            continue
        command.append(f"--{option}")
        if isinstance(value, dict):
            command.append(json.dumps(value))
        elif value is not True:
            command += map(str, value if isinstance(value, list) else [value])
    return command


def _options(name: str, judge: JudgeConfig) -> dict[str, object]:
    """Return vLLM's options, those of the config last. Raises ValueError for one that is taken."""
    # A line for each request would fill the disk, and push a death's reason out of a log's tail.
    options: dict[str, object] = {"dtype": "bfloat16", "disable-uvicorn-access-log": True}
    if not judge.gpus:
        options["enforce-eager"] = True  # compiling takes minutes on a CPU
    elif judge.sleep:
        options["enable-sleep-mode"] = True
    given = {key.replace("_", "-"): value for key, value in judge.args.items()}
    for option in TAKEN & given.keys():
        raise ValueError(f"judge.{name}.args.{option}: the run sets it itself; remove it")
    return options | given


def _check_gpus(name: str, judge: JudgeConfig) -> None:
    key = f"judge.{name}"
    num_gpus = len(judge.gpus)
    need = judge.tp * judge.replicas
    if len(set(judge.gpus)) < num_gpus or any(gpu < 0 for gpu in judge.gpus):
        raise ValueError(f"{key}.gpus={judge.gpus}: each must be there once, from 0")
    if not num_gpus and judge.tp > 1:
        raise ValueError(f"{key}.tp={judge.tp} without GPUs: a server on the CPU has tp=1")
    if num_gpus and num_gpus != need:
        fix = f"name {need} GPUs"
        if num_gpus % judge.tp == 0:
            fix = f"set {key}.replicas={num_gpus // judge.tp}, or {fix}"
        raise ValueError(
            f"{key}.gpus names {num_gpus} GPUs, {key}.replicas={judge.replicas} servers of "
            f"{key}.tp={judge.tp} need {need}; {fix}"
        )


def _check_model(name: str, folder: Path) -> None:
    key = f"judge.{name}.model={folder}"
    if not folder.is_dir():
        raise ValueError(f"{key} is no folder; download the model, nothing is fetched at run time")
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} has no config.json that can be read: {error}") from None
    architectures = model.get("architectures") or [] if isinstance(model, Mapping) else []
    takes_pictures = any(part in key for key in model for part in PICTURE_KEYS)
    if not takes_pictures and not set(architectures) & set(PICTURE_MODELS):
        raise ValueError(
            f"{key} takes no pictures: its config.json has no vision_config, its architectures are "
            f"{architectures}; give a vision-language model, e.g. Qwen3-VL"
        )
