"""Read vllm-omni's stage configuration files (its `--deploy-config`); refuse what does not fit.

They are read without vllm-omni, whose import takes ten seconds: a run checks its file first of all.
The format is that of 0.26 and 0.28: stages by their id, over those of a `base_config`. megadiff
samples in one stage, which vllm-omni calls a topology (`pipeline`) of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megadiff.models.adapter import ModelAdapter
from megadiff.rollout.limits import LARGEST_SCALE, Limits
from megadiff.types import JsonObject

KEY = "rollout.stage_config"
FILE_KEYS = ("base_config", "pipeline", "async_chunk", "trust_remote_code", "connectors", "stages")
# of a stage: the only value that the key may have, None for any
STAGE_KEYS: dict[str, object] = {
    "stage_id": 0,
    "devices": None,
    "num_replicas": 1,  # the run's number is rollout.num_replicas
    "max_num_seqs": 1,  # a call's groups fill the batch already
    "max_num_batched_tokens": None,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": None,
    "enforce_eager": None,  # rollout.compile decides
    "trust_remote_code": None,
    "tensor_parallel_size": None,
    "model_class_name": None,
    "enable_multithread_weight_load": None,
    "num_weight_load_threads": None,
    "default_sampling_params": None,
}
# Of default_sampling_params: a seed has no meaning here, as noise has an identity of its own.
SAMPLING_KEYS = ("seed", "extra_args")
# Of its extra_args, by vllm-omni's names, with vllm-omni's defaults.
THINKING: JsonObject = {
    "think": False,
    "max_think_tokens": 1000,
    "do_sample": False,
    "text_temperature": 0.3,
}


def check_stages(
    file: Path, adapter: ModelAdapter, *, tp: int, num_devices: int | None = None
) -> None:
    """Raise ValueError, which names file and key, unless a replica can run by the file.

    num_devices: that the replica will see; None where that is not known.
    """
    where = f"{KEY}={file}"
    stages = read_stages(file)
    topology = adapter.stage_topology
    if not topology:
        raise ValueError(
            f"{where}: vllm-omni runs {adapter.title} without a stage file; leave {KEY} empty"
        )

    if stages.get("pipeline") != topology:
        raise ValueError(
            f"{where} is of pipeline {stages.get('pipeline')!r}; {adapter.title} is sampled by "
            f"{topology!r}, whose one stage does all, thinking too; set pipeline: {topology}"
        )
    _check_keys(stages, FILE_KEYS, where)

    ids = [stage.get("stage_id") for stage in stages["stages"]]
    if ids != [0]:
        raise ValueError(
            f"{where} has stages {ids}; {topology} has one, of stage_id 0; remove the others"
        )
    stage = stages["stages"][0]
    _check_stage(stage, f"{where}, stage 0", adapter.stage_class, tp, num_devices)
    parameters = stage.get("default_sampling_params") or {}
    _check_keys(parameters, SAMPLING_KEYS, f"{where}, stage 0: default_sampling_params")
    extra = parameters.get("extra_args") or {}
    _check_keys(extra, THINKING, f"{where}, stage 0: default_sampling_params.extra_args")
    thinking(file)


def _check_stage(
    stage: JsonObject, where: str, model_class: str, tp: int, num_devices: int | None
) -> None:
    _check_keys(stage, STAGE_KEYS, where)
    only = STAGE_KEYS | {"model_class_name": model_class, "tensor_parallel_size": tp}
    for key, value in stage.items():
        if only[key] is not None and value != only[key]:
            raise ValueError(f"{where}: {key} is {value!r}, not {only[key]!r}; remove the key")

    devices = [index.strip() for index in str(stage.get("devices", "0")).split(",")]
    if not all(index.isdecimal() for index in devices):
        raise ValueError(f"{where}: devices is {stage['devices']!r}; give numbers such as '0,1'")
    if len(set(devices)) != len(devices):
        raise ValueError(
            f"{where}: devices is {stage['devices']!r}, a GPU twice; name each worker's own"
        )
    if len(devices) != tp:
        raise ValueError(
            f"{where}: devices names {len(devices)} GPUs, rollout.tp={tp} takes {tp}; give as many"
        )
    highest = max(map(int, devices))
    if num_devices is not None and highest >= num_devices:
        raise ValueError(
            f"{where}: devices names GPU {highest}, {num_devices} are visible to the replica; "
            f"give 0 to {num_devices - 1}"
        )


@cache  # every step asks; and a run stays with what it began with
def thinking(file: str | Path) -> Mapping[str, int | float]:
    """Return think_tokens and think_temperature of Sampling, as the file's stage says.

    Both are 0 without a file, or where it does not let the model think.
    Raises ValueError for a setting that is none. The rest is for check_stages(), which knows the
    model and so says first whether it has such stages at all.
    """
    if not str(file):
        return {}
    where = f"{KEY}={file}, stage 0: default_sampling_params.extra_args"
    stages: list[JsonObject] = read_stages(Path(file))["stages"]
    extra: object = stages[0] if stages else {}
    for key in ("default_sampling_params", "extra_args"):
        extra = extra.get(key) if isinstance(extra, dict) else None
    if not isinstance(extra, dict):
        extra = {}

    for key, default in THINKING.items():
        value = extra.get(key, default)
        # an int is a good temperature, and True is no number
        if type(value) not in {type(default), int if key == "text_temperature" else type(default)}:
            raise ValueError(f"{where}.{key} is {value!r}, it must be {type(default).__name__}")

    settings = THINKING | extra
    if not settings["think"]:
        return {"think_tokens": 0, "think_temperature": 0.0}
    most = Limits().think_tokens
    if not 1 <= settings["max_think_tokens"] <= most:
        raise ValueError(
            f"{where}.max_think_tokens is {settings['max_think_tokens']}; give 1 to {most}, or "
            "think: false"
        )
    if settings["do_sample"] and not 0 < settings["text_temperature"] <= LARGEST_SCALE:
        raise ValueError(
            f"{where}.text_temperature is {settings['text_temperature']} with "
            f"do_sample: true; give more than 0, at most {LARGEST_SCALE}, or do_sample: false"
        )
    temperature = float(settings["text_temperature"]) if settings["do_sample"] else 0.0
    return {"think_tokens": settings["max_think_tokens"], "think_temperature": temperature}


def read_stages(file: Path, over: tuple[Path, ...] = ()) -> JsonObject:
    """Return a file's settings, merged over its base_config as vllm-omni merges them.

    `stages` is a list. over: the files whose base this one is.
    Raises ValueError for a file that is missing or no such configuration.
    """
    if file.resolve() in over:
        raise ValueError(f"{KEY}={over[0]}: {file} is its own base_config; name another file")
    try:
        settings = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(
            f"{KEY}={file} cannot be read: {error.strerror}; give a file such as vllm-omni's "
            "deploy/bagel_single_stage.yaml"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{KEY}={file} is no YAML: {error}") from None

    rows = settings.get("stages") or [] if isinstance(settings, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{KEY}={file} has no list of `stages`; give vllm-omni's deploy format")
    identities = [row.get("stage_id") for row in rows]
    if not all(type(identity) is int for identity in identities):
        raise ValueError(f"{KEY}={file} has stages {identities}; give each a number as stage_id")
    settings["stages"] = rows
    if "base_config" not in settings:
        return settings

    base = read_stages(file.parent / str(settings["base_config"]), (*over, file.resolve()))
    merged = {row.get("stage_id"): row for row in base["stages"]}
    for row in rows:
        identity = row.get("stage_id")
        merged[identity] = _merged(merged.get(identity, {}), row)
    return base | settings | {"stages": list(merged.values())}


def _merged(base: JsonObject, over: JsonObject) -> JsonObject:
    """Return base with over's keys in it, dicts key by key."""
    merged: JsonObject = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merged(before, value)
        else:
            merged[key] = value
    return merged


def single_stage(topology: str, *, tp: int) -> str:
    """Return the file of a family's own single stage, for a run that gives none."""
    stage: dict[str, Any] = {"stage_id": 0, "devices": ",".join(map(str, range(tp)))}
    return yaml.safe_dump({"pipeline": topology, "async_chunk": False, "stages": [stage]})


def _check_keys(
    settings: object, known: Mapping[str, object] | tuple[str, ...], where: str
) -> None:
    """Raise ValueError that names what is not known."""
    if not isinstance(settings, dict):
        raise ValueError(f"{where} is {settings!r:.60}; it must be keys with values")
    unknown = [str(key) for key in settings if key not in known]
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(unknown)}, which the run's own config decides or nothing "
            f"records; remove it. It may have {', '.join(known)}"
        )
