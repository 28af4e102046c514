"""Keep a step's samples in a checkpoint: one file of groups and rewards for each dp rank.

checkpoints/step_000010/batch_00000.safetensors holds the samples of step 11, whose update has not
been made. Groups are in the order of the step's prompts, over the files in the order of their
names, so that any other number of dp ranks can read them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.wire import COLUMNS, PLAIN_FIELDS, read_record
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.model_files import parse_json
from megadiff.tensors.seals import SEAL_KEY, UNSEALED
from megadiff.tensors.shards import SHARD_SUFFIX, UNFINISHED
from megadiff.tensors.tensor_file import (
    TensorFile,
    TensorMeta,
    TensorWriter,
    canonical_order,
    check_format,
)
from megadiff.train.sampling import Rewards
from megadiff.types import (
    Figures,
    JsonObject,
    Prompt,
    RolloutGroup,
    RolloutRequest,
    Sampling,
    Tensors,
)

logger = logging.getLogger(__name__)
METADATA_KEY = "megadiff"
FORMAT = 1  # of the JSON under that key
REWARD = "reward."  # in front of a reward's name, as the name of its scores
CONDITIONING = "conditioning."


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The scored groups of one step on one rank.

    identities: of the requests that the groups answer, see identity().
    figures: the rewards' own, of each scorer that scored the groups; empty on ranks without one.
    scored_by: Scorer.identity.
    """

    step: int
    identities: tuple[str, ...]
    groups: list[RolloutGroup]
    rewards: Rewards
    figures: tuple[dict[str, Figures], ...]
    scored_by: str


class SavedSamples:
    """Hold what the checkpoint that a run goes on from has of samples for this rank."""

    def __init__(self) -> None:
        self.samples: StepSamples | None = None

    def load(self, folder: Path, *, config: Config, mesh: Mesh) -> None:
        """Read them. Raises ValueError for a file that is missing or damaged."""
        self.samples = None
        if config.train.staleness and mesh.is_model_group_source:
            num_prompts = config.train.prompts_per_step
            self.samples = read_batch(folder, num_prompts=num_prompts, mesh=mesh)


def identity(request: RolloutRequest) -> str:
    """Return as JSON what decides a group's samples, beside the weights."""
    return json.dumps(
        {
            "prompt": request.prompt.id,
            "sampling": dataclasses.asdict(request.sampling),
            "sample_indices": request.sample_indices,
            "seed": request.seed,
            "step": request.step,
        },
        sort_keys=True,
    )


def batch_file(folder: Path, dp_rank: int) -> Path:
    return folder / f"batch_{dp_rank:05d}{SHARD_SUFFIX}"


def batch_files(folder: Path) -> list[Path]:
    """Return a checkpoint's files of samples, in the order of their dp ranks."""
    return sorted(folder.glob(f"batch_*{SHARD_SUFFIX}"))


def write_batch(folder: Path, *, samples: StepSamples, mesh: Mesh) -> None:
    """Write this dp rank's samples; the file has its name when it is whole and on the disk."""
    tensors = {f"{REWARD}{name}": value for name, value in samples.rewards.items()}
    for index, group in enumerate(samples.groups):
        for name, tensor in _group_tensors(group).items():
            tensors[f"{index}.{name}"] = tensor

    record = {
        "format": FORMAT,
        "num_files": mesh.dp,
        "step": samples.step,
        "identities": samples.identities,
        "figures": samples.figures,
        "scored_by": samples.scored_by,
        "groups": [_plain_fields(group) for group in samples.groups],
        "fingerprints": {name: fingerprint(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(record, default=dataclasses.asdict)
    metas = {
        name: TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    target = batch_file(folder, mesh.dp_rank)
    unfinished = target.with_suffix(UNFINISHED)
    metadata = {METADATA_KEY: text, SEAL_KEY: UNSEALED}
    try:
        writer = TensorWriter(unfinished, canonical_order(metas), metadata=metadata)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close(sync=True)
        unfinished.rename(target)
    except OSError:
        unfinished.unlink(missing_ok=True)  # a checkpoint is complete without it
        raise


def read_batch(folder: Path, *, num_prompts: int, mesh: Mesh) -> StepSamples | None:
    """Return this dp rank's samples, None where the checkpoint holds none of so many prompts.

    num_prompts: of a step, over all ranks. Raises ValueError for a file that is missing or damaged.
    """
    files = [_BatchFile(path) for path in batch_files(folder)]
    if not files:
        return None
    wanted = files[0].record["num_files"]
    if len(files) != wanted:
        raise ValueError(
            f"{folder} has {len(files)} of {wanted} files of samples; use the checkpoint before"
        )
    total = sum(file.num_groups for file in files)
    if total != num_prompts:
        logger.warning(
            "%s holds samples of %d prompts, train.prompts_per_step=%d", folder, total, num_prompts
        )
        return None

    count = num_prompts // mesh.dp
    begin = mesh.dp_rank * count
    parts = []
    for file in files:
        parts.append(file.samples(range(begin, begin + count)))
        begin -= file.num_groups  # as the next file counts
    return _joined([part for part in parts if part])


def drop_incomplete(folder: Path, *, num_files: int) -> bool:
    """Remove the files where some of them are missing; tell whether all are there."""
    files = batch_files(folder)
    if len(files) == num_files:
        return True
    for file in files:
        file.unlink()
    return False


class _BatchFile:
    """One dp rank's file, open for reading. record: the JSON of its metadata."""

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        try:
            self.record: dict[str, Any] = parse_json(self._file.metadata[METADATA_KEY])
            written_as = self.record["format"]
            self.num_groups = len(self.record["groups"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no samples of a step: {error!r}") from error
        check_format(path, written_as, FORMAT)

    def samples(self, wanted: range) -> StepSamples | None:
        """Return the groups of these positions that are in this file, None without one.

        The rewards' own figures are of the whole file. They come with its first group.
        """
        indices = range(max(wanted.start, 0), min(wanted.stop, self.num_groups))
        if not indices:
            return None
        rows = slice(indices.start, indices.stop)
        rewards = {
            name.removeprefix(REWARD): self._tensor(name)[rows]
            for name in self._file.tensors
            if name.startswith(REWARD)
        }
        return StepSamples(
            step=self.record["step"],
            identities=tuple(self.record["identities"][rows]),
            groups=[self._group(index) for index in indices],
            rewards=rewards,
            figures=() if indices.start else tuple(self.record["figures"]),
            scored_by=self.record.get("scored_by", ""),
        )

    def _group(self, index: int) -> RolloutGroup:
        prefix = f"{index}."
        tensors = {
            name.removeprefix(prefix): self._tensor(name)
            for name in self._file.tensors
            if name.startswith(prefix)
        }
        conditioning = {
            name.removeprefix(CONDITIONING): tensors.pop(name)
            for name in list(tensors)
            if name.startswith(CONDITIONING)
        }
        fields: dict[str, Any] = dict(self.record["groups"][index])
        fields["prompt"] = read_record(Prompt, fields["prompt"], "prompt")
        fields["sampling"] = read_record(Sampling, fields["sampling"], "sampling")
        fields["sample_indices"] = tuple(fields["sample_indices"])
        fields |= tensors
        return RolloutGroup(**fields, conditioning=conditioning)

    def _tensor(self, name: str) -> Tensor:
        # A copy: the checkpoint is deleted when newer ones are there.
        tensor = self._file.tensor(name).clone()
        if fingerprint(tensor) != self.record["fingerprints"][name]:
            raise ValueError(
                f"{self._file.path}: tensor {name!r} does not match its fingerprint; the file is "
                "corrupt"
            )
        return tensor


def _joined(parts: Sequence[StepSamples]) -> StepSamples:
    first = parts[0]
    rewards = {}
    for name in first.rewards:
        rewards[name] = torch.cat([part.rewards[name] for part in parts])
    return StepSamples(
        step=first.step,
        identities=tuple(chain.from_iterable(part.identities for part in parts)),
        groups=list(chain.from_iterable(part.groups for part in parts)),
        rewards=rewards,
        figures=tuple(chain.from_iterable(part.figures for part in parts)),
        scored_by=first.scored_by,
    )


def _group_tensors(group: RolloutGroup) -> Tensors:
    tensors = {name: getattr(group, name) for name in COLUMNS} | {"schedule": group.schedule}
    for name, tensor in group.conditioning.items():
        tensors[f"{CONDITIONING}{name}"] = tensor
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _plain_fields(group: RolloutGroup) -> JsonObject:
    fields = {name: getattr(group, name) for name in PLAIN_FIELDS}
    # columns of the row may be no JSON values, and the run has them
    return fields | {"prompt": replace(group.prompt, fields={})}
