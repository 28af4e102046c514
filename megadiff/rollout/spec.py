"""Say how one replica runs: flags for people, a file for the trainer, what the server reads.

A new flag is a field here, with the key of a run's config where there is one, and the place that
uses it. Workers find every field in vllm-omni's custom_pipeline_args under the same name.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megadiff.config.schema import Config


def _flag(help: str, default: Any = MISSING, *, key: str = "") -> Any:
    """Return a field with its flag's help. key: of a run's config, which decides it for a run."""
    return field(default=default, metadata={"help": help, "key": key})


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """Describe one replica. The token is no part of it: files and command lines can be read."""

    __pydantic_config__ = {"extra": "forbid"}

    model: Path = _flag("a diffusers pipeline folder", key="model.path")
    family: str = _flag(
        "module:Class of its family's adapter; by default a registered one", "", key="model.family"
    )
    name: str = _flag(
        "how logs, the registry and the OpenAI routes call it; by default HOSTNAME-PORT", ""
    )
    run: str = _flag("the run that it is started for, in process titles", "", key="run.name")
    host: str = _flag("any but loopback needs a token", "127.0.0.1")
    port: int = _flag("0 takes any free one", 8000)
    url: str = _flag(
        "the address to announce, where a proxy stands in front: https://HOST:PORT", ""
    )
    device: Literal["auto", "cpu", "cuda"] = _flag(
        "a check against the vLLM build, which decides", "auto", key="run.device"
    )
    dtype: Literal["float32", "bfloat16"] = _flag("of the weights", "bfloat16", key="model.dtype")
    registry: Path | None = _flag(
        "the folder to announce <name>.json in while serving", None, key="rollout.registry"
    )
    weights: Path | None = _flag(
        "sync.folder of a run with sync.transport=disk: serve its newest version",
        None,
        key="sync.folder",
    )
    tp: int = _flag("workers (GPUs) that share the transformer's weights", 1, key="rollout.tp")
    stacks: Path | None = _flag("a run's folder stacks/, for `megadiff stacks`", None)
    parent_pid: int | None = _flag("exit when this process does", None)
    compile: bool = _flag("torch.compile the transformer's blocks", False, key="rollout.compile")
    fp8: bool = _flag(
        "matrix products of the blocks in FP8 (needs bfloat16)", False, key="rollout.fp8"
    )
    fp8_in_place: bool = _flag(
        "keep FP8 weights in place of the bfloat16 ones: half the memory, but every push must "
        "bring all weights",
        False,
    )
    shared_base: bool = _flag(
        "load no transformer: map the frozen weights of a trainer on the same device", False
    )
    stage_config: Path | None = _flag(
        "a stage configuration file of vllm-omni", None, key="rollout.stage_config"
    )
    float32_streams: bool = _flag(
        "as the run's model.float32_streams", False, key="model.float32_streams"
    )

    @property
    def ends_with_run(self) -> bool:
        """Tell whether a run has started it, in its own folder: nobody needs it once that ends.

        parent_pid does not tell: launch/serve.sh gives it, too.
        """
        return self.stacks is not None

    def to_json(self) -> str:
        """Return what read_spec() reads."""
        return json.dumps(asdict(self), default=str, indent=1)  # str: of paths


def process_title(name: str, run: str, process: str) -> str:
    """Return a replica's title in ps: `replica_0 of RUN: server`."""
    of_run = f" of {run}" if run else ""
    return f"{name}{of_run}: {process}"


def config_spec(config: Config, **settings: Any) -> ReplicaSpec:
    """Return the spec of a run's replica: what its config says, but for the settings given."""
    told: dict[str, Any] = {name: attrgetter(key)(config) for name, key in config_keys().items()}
    told["model"] = Path(config.model.path)
    for name in ("registry", "stage_config"):
        told[name] = Path(told[name]) if told[name] else None
    told["weights"] = None
    if config.sync.transport == "disk":
        # as a run of separate replicas writes them (train/replicas.py)
        in_run = Path(config.run.dir, config.run.name, "weights")
        told["weights"] = Path(config.sync.folder) if config.sync.folder else in_run

    return ReplicaSpec(**told | settings)


def config_keys() -> dict[str, str]:
    """Return the fields that a run's config decides, each with its key there."""
    return {row.name: row.metadata["key"] for row in fields(ReplicaSpec) if row.metadata["key"]}


def read_spec(file: Path) -> ReplicaSpec:
    """Read a spec in JSON. Raises ValueError with the key, its value and the fix."""
    from pydantic import TypeAdapter, ValidationError  # FastAPI's: only replicas need it

    try:
        # Strict: "2" is no number and 1 is no truth value.
        return TypeAdapter(ReplicaSpec).validate_json(file.read_bytes(), strict=True)
    except OSError as error:
        raise ValueError(f"--spec {file} cannot be read: {error}; give a JSON file") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(
            f"--spec {file}: {key} is {first['input']!r:.100}. {first['msg']}; "
            f"keys are {', '.join(row.name for row in fields(ReplicaSpec))}"
        ) from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser a flag for every field but the model. Absent ones are None."""
    hints = get_type_hints(ReplicaSpec)

    for row in fields(ReplicaSpec):
        if row.name == "model":
            continue
        hint = hints[row.name]
        # None tells what was left out: the spec has the defaults, and --spec takes no flags beside.
        options: dict[str, Any] = {"help": row.metadata["help"], "default": None}

        if hint is bool:
            options["action"] = "store_true"
        elif get_origin(hint) is Literal:
            options["choices"] = get_args(hint)
        else:
            options["type"] = get_args(hint)[0] if get_args(hint) else hint  # Path of Path | None
        parser.add_argument(flag_of(row.name), **options)


def flag_of(name: str) -> str:
    """Return the flag of a field: fp8_in_place → --fp8-in-place."""
    return f"--{name.replace('_', '-')}"
