"""Requests and groups as bytes: JSON, and safetensors with a JSON header. Pure functions, never pickle."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from megadiff.sync.bucket import own_host_tensor
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling, Trajectory

HEADER_KEY = "megadiff"  # the one entry of the safetensors metadata
_COLUMNS = {
    "latents": "latents_SLC",
    "log_probs": "log_probs",
    "pixels": "pixels",
}  # tensor → field of a Trajectory


def requests_to_json(requests: Sequence[RolloutRequest]) -> list[dict[str, Any]]:
    """RolloutRequests as a JSON list; a first frame in base64."""
    return [
        dataclasses.asdict(request)
        | {"first_frame": base64.b64encode(request.first_frame).decode()}
        for request in requests
    ]


def requests_from_json(value: object) -> list[RolloutRequest]:
    """The inverse. Raises ValueError that names the request, and its key which is missing, unknown or of a wrong type."""
    if not isinstance(value, list):
        raise ValueError(
            f"the body is a {type(value).__name__}; it must be a JSON list of requests"
        )
    requests = []
    for place, item in enumerate(value):
        try:
            requests.append(_request_from_json(item))
        except ValueError as error:
            raise ValueError(f"requests[{place}]: {error}") from None
    return requests


def encode_groups(groups: Sequence[RolloutGroup]) -> bytes:
    """safetensors bytes of groups that share one sampling, and a JSON header.

    What every sample has is one tensor over the samples of all groups: hundreds of small ones would take longer to write
    than their bytes do. Conditioning, whose width is a group's own, is called `<place>.<name>`.
    """
    samples = [sample for group in groups for sample in group.trajectories]
    columns = {
        field: torch.stack([getattr(sample, name) for sample in samples])
        for field, name in _COLUMNS.items()
    }
    conditioning = {
        f"{place}.{name}": tensor
        for place, group in enumerate(groups)
        for name, tensor in group.conditioning.items()
    }
    schedule = {"schedule": groups[0].schedule}
    return _save(
        {**columns, **schedule, **conditioning}, {"groups": [_header(group) for group in groups]}
    )


def decode_groups(body: bytes) -> list[RolloutGroup]:
    """The inverse of encode_groups. Raises ValueError when the body does not hold groups."""
    tensors, header = _load(body)
    columns = {field: tensors.pop(field).unbind() for field in _COLUMNS}
    schedule = tensors.pop("schedule")
    conditioning: list[dict[str, Tensor]] = [{} for _ in header["groups"]]
    for key, tensor in tensors.items():
        place, _, name = key.partition(".")
        conditioning[int(place)][name] = tensor
    groups, first = [], 0
    for own, of_group in zip(conditioning, header["groups"], strict=True):
        rows = slice(first, first + len(of_group["sample_indices"]))
        groups.append(
            _group(
                {field: column[rows] for field, column in columns.items()}, schedule, own, of_group
            )
        )
        first = rows.stop
    return groups


def _request_from_json(value: object) -> RolloutRequest:
    fields = _fields(value, RolloutRequest, "request")
    fields["prompt"] = Prompt(**_fields(fields["prompt"], Prompt, "prompt"))
    sampling = _fields(fields["sampling"], Sampling, "sampling")
    if "sde_window_range" in sampling:
        sampling["sde_window_range"] = _integers(
            sampling["sde_window_range"], "sampling.sde_window_range", length=2
        )
    fields["sampling"] = Sampling(**sampling)
    fields["sample_indices"] = _integers(fields["sample_indices"], "request.sample_indices")
    fields["first_frame"] = _bytes(fields.get("first_frame", ""), "request.first_frame")
    return RolloutRequest(**fields)


def _header(group: RolloutGroup) -> dict[str, Any]:
    return {
        "prompt": dataclasses.asdict(group.prompt),
        "sampling": dataclasses.asdict(group.sampling),
        "sample_indices": [trajectory.sample_index for trajectory in group.trajectories],
        "window_start": group.trajectories[0].window_start,
        "policy_version": group.policy_version,
        "replica": group.replica,
    }


def _group(
    columns: Mapping[str, Sequence[Tensor]],
    schedule: Tensor,
    conditioning: dict[str, Tensor],
    header: Mapping[str, Any],
) -> RolloutGroup:
    prompt = Prompt(**_fields(header["prompt"], Prompt, "prompt"))
    sampling = _fields(header["sampling"], Sampling, "sampling")
    sampling["sde_window_range"] = tuple(sampling["sde_window_range"])
    window = slice(header["window_start"], header["window_start"] + len(columns["latents"][0]))
    sigmas = schedule[window]
    shared = {
        "sigmas": sigmas,
        "timesteps": 1000 * sigmas[:-1],
        "window_start": window.start,
        "prompt_id": prompt.id,
        "policy_version": header["policy_version"],
    }
    rows = zip(header["sample_indices"], *columns.values(), strict=True)
    return RolloutGroup(
        prompt=prompt,
        sampling=Sampling(**sampling),
        schedule=schedule,
        conditioning=conditioning,
        trajectories=tuple(
            Trajectory(
                sample_index=index, **shared, **dict(zip(_COLUMNS.values(), row, strict=True))
            )
            for index, *row in rows
        ),
        policy_version=header["policy_version"],
        replica=header["replica"],
    )


def _save(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    return save(
        {name: own_host_tensor(tensor) for name, tensor in tensors.items()},
        metadata={HEADER_KEY: json.dumps(header)},
    )


def _load(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors = load(body)
    except SafetensorError as error:
        raise ValueError(f"the body of {len(body)} bytes is not safetensors: {error}") from error
    length = int.from_bytes(body[:8], "little")
    metadata = json.loads(body[8 : 8 + length]).get("__metadata__", {})
    if HEADER_KEY not in metadata:
        raise ValueError(
            f"the safetensors metadata lacks {HEADER_KEY!r}; was it written by encode_groups?"
        )
    return tensors, json.loads(metadata[HEADER_KEY])


_TYPES = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "int | None": (int, type(None)),
}


def _fields(value: object, record: type, where: str) -> dict[str, Any]:
    """The keyword arguments of a record, checked for names and for the types of its plain fields."""
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
        types = _TYPES.get(str(fields[name].type))
        if types and (
            not isinstance(item, types) or (isinstance(item, bool) and types is not bool)
        ):
            raise ValueError(
                f"{where}.{name}={item!r} is a {type(item).__name__}; it must be {fields[name].type}"
            )
    return dict(value)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _integers(value: object, where: str, *, length: int | None = None) -> tuple[int, ...]:
    good = isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if not good or length not in (None, len(value)):
        raise ValueError(
            f"{where}={value!r} must be a list of {'' if length is None else f'{length} '}integers"
        )
    return tuple(value)


def _bytes(value: object, where: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:  # binascii's own error is a ValueError
        raise ValueError(f"{where} is {value!r:.40}, not bytes in base64 ({error})") from None
