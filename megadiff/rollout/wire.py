"""Write requests as JSON, and groups as safetensors with a JSON header. Pure functions, no pickle.

The header is the entry `megadiff` of the safetensors metadata.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from megadiff.sync.bucket import own_host_tensor
from megadiff.types import JsonObject, Prompt, RolloutGroup, RolloutRequest, Sampling, Tensors

Record = TypeVar("Record")
HEADER_KEY = "megadiff"  # the one entry of the safetensors metadata
COLUMNS = ("latents_GSLC", "log_probs_GW", "pixels_GFHWC")  # of a group, a row for each sample
PLAIN_FIELDS = tuple(  # of a group, which travel in the header
    field.name
    for field in dataclasses.fields(RolloutGroup)
    if field.name not in (*COLUMNS, "schedule", "conditioning")
)


def requests_to_json(requests: Sequence[RolloutRequest]) -> list[JsonObject]:
    """Return RolloutRequests as a JSON list, images in base64."""
    rows = []
    for request in requests:
        images = [base64.b64encode(image).decode() for image in request.images]
        rows.append(dataclasses.asdict(request) | {"images": images})
    return rows


def requests_from_json(value: object) -> list[RolloutRequest]:
    """Read RolloutRequests back.

    Raises ValueError that names the request, and its key that is missing, unknown or of wrong type.
    """
    if not isinstance(value, list):
        raise ValueError(
            f"the body is a {type(value).__name__}; it must be a JSON list of requests"
        )
    requests = []
    for index, item in enumerate(value):
        try:
            requests.append(read_record(RolloutRequest, item, "request"))
        except ValueError as error:
            raise ValueError(f"requests[{index}]: {error}") from None
    return requests


def encode_groups(groups: Sequence[RolloutGroup]) -> bytes:
    """Write groups that share one sampling and schedule as safetensors bytes.

    A column is one tensor over all groups: writing hundreds of small tensors takes longer than
    writing their bytes. Conditioning differs in width, so each group's is `<index>.<name>`.
    """
    tensors = {"schedule": groups[0].schedule}
    for name in COLUMNS:
        tensors[name] = torch.cat([getattr(group, name) for group in groups])
    for index, group in enumerate(groups):
        for name, tensor in group.conditioning.items():
            tensors[f"{index}.{name}"] = tensor
    header = {"groups": [_header(group) for group in groups]}
    return save(
        {name: own_host_tensor(tensor) for name, tensor in tensors.items()},
        metadata={HEADER_KEY: json.dumps(header, default=dataclasses.asdict)},
    )


def decode_groups(body: bytes) -> list[RolloutGroup]:
    """Read groups back. Raises ValueError when the body does not hold groups."""
    tensors, header = _load(body)
    missing = [name for name in (*COLUMNS, "schedule") if name not in tensors]
    if missing:
        raise ValueError(
            f"the groups lack {', '.join(missing)}; trainer and replica must run the same megadiff"
        )

    headers = header["groups"]
    sizes = [len(group["sample_indices"]) for group in headers]
    columns = {name: _rows(tensors.pop(name), name, sizes) for name in COLUMNS}
    schedule = tensors.pop("schedule")
    conditioning: list[Tensors] = [{} for _ in headers]

    for key, tensor in tensors.items():
        # `<index>.<name>`, as encode_groups() writes them
        number, _, name = key.partition(".")
        conditioning[int(number)][name] = tensor

    annotations = {name: str(_parameters(RolloutGroup)[name].annotation) for name in PLAIN_FIELDS}
    groups = []
    for index, fields in enumerate(headers):
        values: dict[str, Any] = {name: column[index] for name, column in columns.items()}
        for name, annotation in annotations.items():
            values[name] = _field(fields[name], annotation, f"group.{name}")
        group = RolloutGroup(
            **values,
            schedule=schedule,
            conditioning=conditioning[index],
        )
        groups.append(group)

    return groups


def _rows(column: Tensor, name: str, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return each group's rows of a column. Raises ValueError where there are others."""
    if not column.dim() or len(column) != sum(sizes):
        raise ValueError(f"{name} is of shape {list(column.shape)} for {sum(sizes)} samples")
    return column.split(list(sizes))


def _header(group: RolloutGroup) -> JsonObject:
    return {name: getattr(group, name) for name in PLAIN_FIELDS}


def _load(body: bytes) -> tuple[Tensors, JsonObject]:
    try:
        tensors = load(body)
    except SafetensorError as error:
        raise ValueError(f"the body of {len(body)} bytes is not safetensors: {error}") from error

    # `load` drops the metadata; the file begins with its header's length in 8 bytes
    length = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + length]).get("__metadata__", {})
    if HEADER_KEY not in metadata:
        raise ValueError(
            f"the safetensors metadata lacks {HEADER_KEY!r}; was it written by encode_groups?"
        )
    return tensors, json.loads(metadata[HEADER_KEY])


# By how a record's field is annotated. Fields of any other type are taken as they come.
_RECORDS: dict[str, type] = {"Prompt": Prompt, "Sampling": Sampling}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    # JSON does not tell 1 from 1.0
    "float": (int, float),
    "str": str,
    "bool": bool,
    "int | None": (int, type(None)),
}


@cache  # a signature takes longer to make than a record to check, and a call has hundreds
def _parameters(record: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(record).parameters


def read_record(record: type[Record], value: object, where: str) -> Record:
    """Return a record of a JSON object, with checked names and types of its fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}; it must be a JSON object")

    fields = _parameters(record)  # type: ignore[arg-type]  # a class has a hash
    unknown = sorted(value.keys() - fields.keys())
    if unknown:
        raise ValueError(
            f"{where} has unknown keys {', '.join(unknown)[:200]}; known: {', '.join(fields)}"
        )

    required = {name for name, field in fields.items() if field.default is field.empty}
    missing = sorted(required - value.keys())
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")

    arguments = {}
    for name, item in value.items():
        arguments[name] = _field(item, str(fields[name].annotation), f"{where}.{name}")
    return record(**arguments)


def _field(value: object, wanted: str, where: str) -> object:
    """Return a field's value as its record has it. wanted: its annotation."""
    if wanted in _RECORDS:
        return read_record(_RECORDS[wanted], value, wanted.lower())
    if wanted == "tuple[int, int]":
        return _pair(value, where)
    if wanted in _TUPLES:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}={value!r:.100} is a {type(value).__name__}, not a list")
        return tuple(_TUPLES[wanted](item, where) for item in value)

    types = _TYPES.get(wanted)
    # True is an int to Python, but no number to us.
    is_wrong_bool = isinstance(value, bool) and types is not bool
    if types and (is_wrong_bool or not isinstance(value, types)):
        raise ValueError(f"{where}={value!r:.100} is a {type(value).__name__}; it must be {wanted}")
    return value


def _item(value: object, where: str, *, kind: type) -> object:
    if type(value) is not kind:
        raise ValueError(
            f"{where} has {value!r:.40}, a {type(value).__name__}; it must be {kind.__name__}"
        )
    return value


def _pair(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or [type(item) for item in value] != [int, int]:
        raise ValueError(f"{where}={value!r} must be a list of 2 integers")
    return tuple(value)


def _bytes(value: object, where: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError) as error:  # binascii's own error is a ValueError
        raise ValueError(f"{where} has {value!r:.40}, not bytes in base64 ({error})") from None


_TUPLES: dict[str, Callable[[object, str], object]] = {  # of any length → how an item is read
    "tuple[bytes, ...]": _bytes,
    "tuple[int, ...]": partial(_item, kind=int),
    "tuple[str, ...]": partial(_item, kind=str),
    "tuple[ImageSize, ...]": _pair,
}
