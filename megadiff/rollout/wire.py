"""Write requests as JSON, and groups as safetensors with a JSON header. Pure functions, no pickle.

The header is the entry `megadiff` of the safetensors metadata.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from megadiff.sync.bucket import own_host_tensor
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling

HEADER_KEY = "megadiff"  # the one entry of the safetensors metadata
COLUMNS = ("latents_GSLC", "log_probs_GW", "pixels_GFHWC")  # of a group, a row for each sample


def requests_to_json(requests: Sequence[RolloutRequest]) -> list[dict[str, Any]]:
    """Return RolloutRequests as a JSON list, a first frame in base64."""
    return [
        dataclasses.asdict(request)
        | {"first_frame": base64.b64encode(request.first_frame).decode()}
        for request in requests
    ]


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
            requests.append(_request_from_json(item))
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
        metadata={HEADER_KEY: json.dumps(header)},
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
    columns = {name: tensors.pop(name).split(sizes) for name in COLUMNS}
    schedule = tensors.pop("schedule")
    conditioning: list[dict[str, Tensor]] = [{} for _ in headers]
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        conditioning[int(number)][name] = tensor
    groups = []
    for index, fields in enumerate(headers):
        group = RolloutGroup(
            prompt=Prompt(**_fields(fields["prompt"], Prompt, "prompt")),
            sampling=_sampling(fields["sampling"]),
            sample_indices=tuple(fields["sample_indices"]),
            window_start=fields["window_start"],
            schedule=schedule,
            conditioning=conditioning[index],
            policy_version=fields["policy_version"],
            replica=fields["replica"],
            **{name: column[index] for name, column in columns.items()},
        )
        groups.append(group)
    return groups


def _request_from_json(value: object) -> RolloutRequest:
    fields = _fields(value, RolloutRequest, "request")
    fields["prompt"] = Prompt(**_fields(fields["prompt"], Prompt, "prompt"))
    fields["sampling"] = _sampling(fields["sampling"])
    fields["sample_indices"] = _integers(fields["sample_indices"], "request.sample_indices")
    fields["first_frame"] = _bytes(fields.get("first_frame", ""), "request.first_frame")
    return RolloutRequest(**fields)


def _sampling(value: object) -> Sampling:
    fields = _fields(value, Sampling, "sampling")
    if "sde_window_range" in fields:
        where = "sampling.sde_window_range"
        fields["sde_window_range"] = _integers(fields["sde_window_range"], where, length=2)
    return Sampling(**fields)


def _header(group: RolloutGroup) -> dict[str, Any]:
    return {
        "prompt": dataclasses.asdict(group.prompt),
        "sampling": dataclasses.asdict(group.sampling),
        "sample_indices": group.sample_indices,
        "window_start": group.window_start,
        "policy_version": group.policy_version,
        "replica": group.replica,
    }


def _load(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
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


_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "int | None": (int, type(None)),
}


def _fields(value: object, record: type, where: str) -> dict[str, Any]:
    """Return a record's keyword arguments, with checked names and types of plain fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}; it must be a JSON object")
    fields = {field.name: field for field in dataclasses.fields(record)}
    unknown = sorted(value.keys() - fields.keys())
    if unknown:
        raise ValueError(
            f"{where} has unknown keys {', '.join(unknown)}; known: {', '.join(fields)}"
        )
    has_default = {name for name, field in fields.items() if not _is_required(field)}
    missing = sorted(fields.keys() - has_default - value.keys())
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, item in value.items():
        wanted = str(fields[name].type)
        types = _TYPES.get(wanted)
        # True is an int to Python, but no number to us
        is_wrong_bool = isinstance(item, bool) and types is not bool
        if types and (is_wrong_bool or not isinstance(item, types)):
            raise ValueError(
                f"{where}.{name}={item!r} is a {type(item).__name__}; it must be {wanted}"
            )
    return dict(value)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _integers(value: object, where: str, *, length: int | None = None) -> tuple[int, ...]:
    if (
        not isinstance(value, list | tuple)
        or any(type(item) is not int for item in value)
        or length not in (None, len(value))
    ):
        count = "" if length is None else f"{length} "
        raise ValueError(f"{where}={value!r} must be a list of {count}integers")
    return tuple(value)


def _bytes(value: object, where: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError) as error:  # binascii's own error is a ValueError
        raise ValueError(f"{where} is {value!r:.40}, not bytes in base64 ({error})") from None
