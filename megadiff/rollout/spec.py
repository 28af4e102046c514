"""How one replica runs: its flags for people, its file for the trainer, and what the server reads.

A new flag is a field here, the place where the trainer sets it (train/replicas.py) and the place
that uses it. Workers find every field in vllm-omni's custom_pipeline_args under the same name.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

# The JSON types a field may have in a file, by the type that it has in the spec.
JSON_KINDS = {Path: str, str: str, int: int, bool: bool}


def _flag(help: str, *, default: Any = MISSING, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """Describe one replica. The token is no part of it: files and command lines can be read.

    Raises ValueError for a value that is none of a field's choices.
    """

    model: Path = _flag("a diffusers pipeline folder")
    name: str = _flag(
        "how logs, the registry and the OpenAI routes call it; by default HOSTNAME-PORT", default=""
    )
    host: str = _flag("any but loopback needs a token", default="127.0.0.1")
    port: int = _flag("0 takes any free one", default=8000)
    device: str = _flag(
        "a check against the vLLM build, which decides",
        default="auto",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = _flag("of the weights", default="bfloat16", choices=("float32", "bfloat16"))
    registry: Path | None = _flag("announce FOLDER/<name>.json while serving", default=None)
    weights: Path | None = _flag(
        "sync.folder of a run with sync.transport=disk: serve its newest version", default=None
    )
    tp: int = _flag("workers (GPUs) that share the transformer's weights", default=1)
    parent_pid: int | None = _flag("exit when this process does", default=None)
    compile: bool = _flag("torch.compile the transformer's blocks", default=False)
    fp8: bool = _flag("matrix products of the blocks in FP8 (needs bfloat16)", default=False)
    fp8_in_place: bool = _flag(
        "keep FP8 weights in place of the bfloat16 ones: half the memory, but every push must "
        "bring all weights",
        default=False,
    )
    float32_streams: bool = _flag("as the run's model.float32_streams", default=False)

    def __post_init__(self) -> None:
        for row in fields(self):
            choices = row.metadata["choices"]
            value = getattr(self, row.name)
            if choices and value not in choices:
                raise ValueError(f"{row.name}={value!r} is none of {', '.join(choices)}; give one")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, paths as text."""
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }

    def write(self, file: Path) -> None:
        """Write the file that `megadiff serve --spec` reads, for its user alone."""
        file.unlink(missing_ok=True)  # an earlier start's may have another mode
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump(self.to_json(), stream, indent=1)


def read_spec(file: Path) -> ReplicaSpec:
    """Read what write() wrote. Raises ValueError with the key, its value and the fix."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--spec {file} cannot be read: {error}; give a JSON file") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(f"--spec {file} holds a {kind}; it must hold a JSON object")
    known_fields = {row.name: row for row in fields(ReplicaSpec)}
    try:
        for key, value in values.items():
            _check(key, value, known_fields)
        if "model" not in values:
            raise ValueError("it has no key 'model'; give a diffusers pipeline folder")
        kinds = _kinds()
        return ReplicaSpec(
            **{key: None if value is None else kinds[key](value) for key, value in values.items()}
        )
    except ValueError as error:
        raise ValueError(f"--spec {file}: {error}") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser a flag for every field; the model has none. Absent values are None."""
    for row in fields(ReplicaSpec):
        help_text = row.metadata["help"]
        if row.name == "model":
            parser.add_argument("model", nargs="?", type=Path, help=help_text)
            continue
        flag = flag_of(row.name)
        kind = _kinds()[row.name]
        if kind is bool:
            parser.add_argument(flag, action="store_true", default=None, help=help_text)
            continue
        if row.default not in (None, ""):
            help_text += f" (default: {row.default})"
        choices = row.metadata["choices"] or None
        metavar = None if choices else kind.__name__.upper()
        parser.add_argument(flag, type=kind, choices=choices, metavar=metavar, help=help_text)


def flag_of(name: str) -> str:
    """Return the flag of a field: fp8_in_place → --fp8-in-place."""
    return f"--{name.replace('_', '-')}"


@cache
def _kinds() -> dict[str, type]:
    """Return the type of every field; of an optional one the type of its value."""
    kinds = {}
    for name, hint in get_type_hints(ReplicaSpec).items():
        (kinds[name],) = set(get_args(hint) or (hint,)) - {NoneType}
    return kinds


def _check(key: str, value: object, known_fields: Mapping[str, Field]) -> None:
    """Raise ValueError for a key that no field has, and for a value of another JSON type."""
    if key not in known_fields:
        near = get_close_matches(key, known_fields, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(known_fields)}"
        raise ValueError(f"unknown key {key!r} with value {value!r:.100}; {fix}")
    wanted = JSON_KINDS[_kinds()[key]]
    is_absent = value is None and known_fields[key].default is None
    if type(value) is not wanted and not is_absent:  # not isinstance: True is an int
        names = {str: "text in quotes", int: "a whole number", bool: "true or false"}
        raise ValueError(f"{key} is {value!r:.100}; it must be {names[wanted]}")
