"""Conversion of weights between diffusers folders, checkpoints of either engine in any layout, and LoRA files.

A Job says what is written and how it is read back; `convert` streams it into a folder that appears whole or not at all.
"""

from __future__ import annotations

import filecmp
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import yaml

from megadiff.checkpoint.run_folders import CONFIG, PROGRESS, merged_config, progress_record
from megadiff.convert import lora_files
from megadiff.convert.model_folders import (
    ModelFolder,
    file_metadata,
    file_tensors,
    listed,
    open_model,
    rest_of,
    write_index,
)
from megadiff.convert.other_files import OtherFiles
from megadiff.convert.sources import (
    Source,
    check_base,
    open_source,
    parameter_order,
    state_order,
)
from megadiff.process.whole_folder import (
    check_destination,
    check_space,
    clear_up,
    sync_tree,
    whole_folder,
)
from megadiff.tensors.layouts import Box, Layout
from megadiff.tensors.row_sources import FileRows, JoinedRows, MergedRows, RowSource, ShardRows
from megadiff.tensors.shards import ShardFolder
from megadiff.tensors.streaming import Advance, FileSink, ShardSink, fingerprints_of, stream
from megadiff.tensors.tensor_file import TensorFile, TensorMeta, reserve_descriptors
from megadiff.types import DTYPES, LoraSpec

logger = logging.getLogger(__name__)
TARGETS = ("diffusers", "megatron", "fsdp", "peft", "merged")
BACKENDS = {"megatron": "megatron", "fsdp": "veomni"}  # target → engine.backend
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # (what is done, bytes) → advance


@dataclass(frozen=True, kw_only=True)
class Options:
    """to: one of TARGETS. num_ranks: tp of megatron, dp of fsdp. dtype: keep | float32 | bfloat16, of weight files.

    step, base, raw: as of open_source. verify: read all back before dst appears. force: an old dst gives way. sync: dst is
    on the disk before it appears.
    """

    to: str
    num_ranks: int = 1
    dtype: str = "keep"
    step: int | None = None
    base: Path | None = None
    raw: bool = False
    verify: bool = False
    force: bool = False
    sync: bool = False


class Job(Protocol):
    """num_bytes: of the tensors that are written. num_copied: bytes of the files that go along.

    not_finite: names of tensors that write() met with NaN or infinity in them.
    """

    num_bytes: int
    num_copied: int
    not_finite: set[str]

    def write(self, folder: Path, *, advance: Advance, verify: bool) -> dict[str, str]:
        """Returns name → fingerprint of what was to be written where verify is set. Raises ValueError and OSError."""

    def read_back(self, folder: Path) -> RowSource:
        """What write() left in the folder, under the same names."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """num_bytes: of the tensors. seconds: from the first byte that was read to the last that was written."""

    num_bytes: int
    seconds: float


def convert(src: Path, dst: Path, options: Options, *, progress: Progress) -> Written:
    """Writes dst. src is never written to; dst appears whole or not at all.

    Raises ValueError for everything that a user can put right: what src is, what is wrong in it, a dst in the way, a disk
    that is full.
    """
    source = open_source(src, step=options.step, base=options.base, raw=options.raw)
    clear_up(dst)
    check_destination(dst, force=options.force, sources=[src, *source.read_from])
    job = _job(source, options)
    check_space(dst, job.num_bytes + job.num_copied)
    try:
        with whole_folder(dst, force=options.force) as folder:
            start = time.perf_counter()
            with progress("write", job.num_bytes) as advance:
                expected = job.write(folder, advance=advance, verify=options.verify)
                if options.sync:
                    sync_tree(folder)
            _warn_of_not_finite(src, job.not_finite)
            written = Written(num_bytes=job.num_bytes, seconds=time.perf_counter() - start)
            if options.verify:
                with progress("verify", job.num_bytes) as advance:
                    _check(expected, fingerprints_of(job.read_back(folder), advance=advance), dst)
    except OSError as error:
        raise ValueError(
            f"{dst} could not be written: {error}; what was there is as it was, and so is {src}"
        ) from error
    return written


def _warn_of_not_finite(src: Path, names: set[str]) -> None:
    if names:
        logger.warning(
            "warning: %s holds NaN or infinity in %d tensors, which are written as they are: %s",
            src, len(names), listed(sorted(names)),
        )  # fmt: skip


def _check(expected: Mapping[str, str], found: Mapping[str, str], dst: Path) -> None:
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if wrong:
        raise ValueError(
            f"{dst} would hold other tensors than were read, {len(wrong)} of {len(expected)}: {', '.join(wrong[:5])}; the "
            "disk or the memory is at fault, nothing was written"
        )


def _job(source: Source, options: Options) -> Job:
    to, lora = options.to, source.lora
    if to in BACKENDS:
        if options.dtype == "bfloat16":
            raise ValueError(
                f"--dtype bfloat16: checkpoints (--to {to}) hold float32, of which engines make what they use"
            )
        return CheckpointJob(source, Layout(backend=BACKENDS[to], num_ranks=options.num_ranks))
    if options.num_ranks != 1:
        raise ValueError(f"--tp and --dp are of checkpoints; --to {to} has no layout")
    if to in ("peft", "merged") and not lora:
        raise ValueError(f"{source.path} holds whole weights and no LoRA; give --to diffusers")
    if to == "peft" or (to == "diffusers" and lora):
        return LoraJob(source, with_peft=to == "peft", dtype=options.dtype)
    base = _needed_base(source)
    if to == "merged":
        check_base(source, is_named=options.base is not None)
    rows: dict[str, RowSource] = {
        name: component.rows() for name, component in base.components.items()
    }
    for name, policy in source.policy.items():
        rows[name] = MergedRows(rows[name], policy, scale=lora.scale) if to == "merged" else policy
    return ModelJob(rows, base, dtype=options.dtype)


def _needed_base(source: Source) -> ModelFolder:
    if not source.base:
        raise ValueError(
            f"{source.path} is a LoRA without a model; name the model folder with --base"
        )
    return source.base


class ModelJob:
    """A diffusers folder like the base's, with other weights."""

    def __init__(self, rows: Mapping[str, RowSource], base: ModelFolder, *, dtype: str) -> None:
        """rows: of every component. dtype: `keep` is the base's, tensor by tensor."""
        self._rows, self._base = rows, base
        self.not_finite: set[str] = set()
        self._files: dict[
            str, dict[str, dict[str, TensorMeta]]
        ] = {}  # component → its files → their tensors
        for name, component in base.components.items():
            held = component.rows().tensors
            dtypes = {tensor: _kept(dtype, held[tensor].dtype) for tensor in rows[name].tensors}
            self._files[name] = file_tensors(component, dtypes)
        files = (
            tensors for of_component in self._files.values() for tensors in of_component.values()
        )
        self.num_bytes = sum(meta.num_bytes for tensors in files for meta in tensors.values())
        self._rest = rest_of(base)
        self.num_copied = self._rest.num_bytes

    def write(self, folder: Path, *, advance: Advance, verify: bool) -> dict[str, str]:
        self._rest.copy_to(folder)
        expected = {}
        for name, component in self._base.components.items():
            files, place = self._files[name], folder / component.where
            sink = FileSink(place, files, metadata=file_metadata(component, list(files)))
            not_finite: set[str] = set()
            found = stream(
                self._rows[name], sink, advance=advance, verify=verify, not_finite=not_finite
            )
            self._check_merged(name, not_finite)
            self.not_finite |= {f"{name}.{tensor}" for tensor in not_finite}
            expected |= {f"{name}.{tensor}": digits for tensor, digits in found.items()}
            write_index(component, place, files)
        return expected

    def _check_merged(self, component: str, not_finite: set[str]) -> None:
        """Raise ValueError when a tensor that LoRA was added to is not finite now."""
        rows = self._rows[component]
        wrong = sorted(not_finite & rows.merged.keys()) if isinstance(rows, MergedRows) else []
        if wrong:
            raise ValueError(
                f"{self._base.components[component].folder} with the LoRA added is NaN or infinite "
                f"in {len(wrong)} tensors: {listed(wrong)}; the base or the LoRA holds such "
                "values, or alpha is too large"
            )

    def read_back(self, folder: Path) -> RowSource:
        _check_copies(self._rest, folder)
        return JoinedRows(
            {f"{name}.": each.rows() for name, each in open_model(folder).components.items()}
        )


class CheckpointJob:
    """A checkpoint as an engine would write it in a layout, that a run can start from."""

    num_copied = 0

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source, self._layout = source, layout
        self.not_finite: set[str] = set()
        base = _needed_base(source)
        _check_lora_modules(source, base)
        order = parameter_order(source)
        tensors = source.state.tensors
        names = sorted(tensors, key=lambda name: state_order(name, order))
        self._tensors = {
            name: TensorMeta(dtype=torch.float32, shape=tensors[name].shape) for name in names
        }
        boxes = _boxes(source, base, layout)
        reserve_descriptors(len(boxes), what=f"a checkpoint of {len(boxes)} ranks, a file each,")
        self._boxes = [
            {
                name: of_rank[parameter]
                for name in names
                if (parameter := name.rpartition("/")[2]) in of_rank
            }
            for of_rank in boxes
        ]
        self.num_bytes = sum(meta.num_bytes for meta in self._tensors.values())

    def write(self, folder: Path, *, advance: Advance, verify: bool) -> dict[str, str]:
        sink = ShardSink(folder, self._tensors, self._boxes, values=self._source.values)
        expected = stream(
            self._source.state, sink, advance=advance, verify=verify, not_finite=self.not_finite
        )
        (folder / CONFIG).write_text(
            yaml.safe_dump(self._config(), sort_keys=False), encoding="utf-8"
        )
        (folder / PROGRESS).write_bytes(progress_record(folder, self._source.progress))
        return expected

    def read_back(self, folder: Path) -> RowSource:
        shards = ShardFolder(folder)
        return ShardRows(shards, {name: name for name in shards.shapes})

    def _config(self) -> dict[str, object]:
        """The run's, with what is now another; of a diffusers source just that."""
        tp = self._layout.num_ranks if self._layout.backend == "megatron" else 1
        changes: dict[str, dict[str, object]] = {
            "model": {"path": str(_needed_base(self._source).home.resolve())},
            "engine": {"backend": self._layout.backend},
            "parallel": {"dp": 0, "dp_replicate": 1, "sp": 1, "tp": tp},
        }
        if self._source.lora:
            changes["lora"] = {"rank": self._source.lora.rank, "alpha": self._source.lora.alpha}
        return merged_config(self._source.config, changes)


class LoraJob:
    """diffusers' LoRA file; with_peft: and peft's beside it, so that one folder is loaded by both.

    Of a model with several components each has a folder of its own, as both load one component at a time.
    """

    num_copied = 0

    def __init__(self, source: Source, *, with_peft: bool, dtype: str) -> None:
        self._source, self._with_peft = source, with_peft
        self.not_finite: set[str] = set()
        self._spec: LoraSpec = source.lora
        self._tensors = {
            component: {
                name: TensorMeta(dtype=_kept(dtype, meta.dtype), shape=meta.shape)
                for name, meta in rows.tensors.items()
            }
            for component, rows in source.policy.items()
        }
        held = sum(
            meta.num_bytes for tensors in self._tensors.values() for meta in tensors.values()
        )
        self.num_bytes = held * len(self._formats())

    def write(self, folder: Path, *, advance: Advance, verify: bool) -> dict[str, str]:
        expected = {}
        for component, place in self._places(folder).items():
            place.mkdir(exist_ok=True)
            for file, prefix, metadata in self._formats():
                tensors = lora_files.named_as(self._tensors[component], prefix)
                sink = FileSink(place, {file: tensors}, metadata={file: metadata})
                rows = JoinedRows({prefix: self._source.policy[component]})
                found = stream(
                    rows, sink, advance=advance, verify=verify, not_finite=self.not_finite
                )
                expected |= {f"{component}/{name}": digits for name, digits in found.items()}
            if self._with_peft:
                config = lora_files.peft_config(self._spec, base=self._base_path(component))
                (place / lora_files.PEFT_CONFIG).write_text(
                    json.dumps(config, indent=2) + "\n", encoding="utf-8"
                )
        return expected

    def read_back(self, folder: Path) -> RowSource:
        keys = {}
        for component, place in self._places(folder).items():
            files = [TensorFile(place / name) for name, _, _ in self._formats()]
            keys |= {f"{component}/{name}": (file, name) for file in files for name in file.tensors}
        return FileRows(keys)

    def _places(self, folder: Path) -> dict[str, Path]:
        """Component → the folder that its LoRA goes to."""
        known = self._source.base.components if self._source.base else self._source.policy
        is_one = [*known] == [*self._source.policy] and len(known) == 1
        return {
            component: folder if is_one else folder / component for component in self._source.policy
        }

    def _base_path(self, component: str) -> Path | None:
        base = self._source.base
        if not base:
            return None
        return base.path if len(base.components) == 1 else base.components[component].folder

    def _formats(self) -> list[tuple[str, str, dict[str, str]]]:
        """File, prefix of its tensors' names, metadata."""
        diffusers = (
            lora_files.DIFFUSERS_WEIGHTS, lora_files.DIFFUSERS_PREFIX, lora_files.diffusers_metadata(self._spec)
        )  # fmt: skip
        peft = (lora_files.PEFT_WEIGHTS, lora_files.PEFT_PREFIX, {"format": "pt"})
        return [diffusers, peft] if self._with_peft else [diffusers]


def _boxes(source: Source, base: ModelFolder, layout: Layout) -> list[dict[str, Box]]:
    """Of each rank: parameter (`transformer.<name>`) → its box."""
    ranks: list[dict[str, Box]] = []
    for component, rows in source.policy.items():
        model = base.components[component].model
        shapes = {**model.shapes, **{name: meta.shape for name, meta in rows.tensors.items()}}
        boxes = layout.boxes(shapes, model.plan, num_heads=model.num_heads)
        ranks = ranks or [{} for _ in boxes]
        for of_rank, of_component in zip(ranks, boxes, strict=True):
            of_rank |= {f"{component}.{name}": box for name, box in of_component.items()}
    return ranks


def _kept(dtype: str, held: torch.dtype) -> torch.dtype:
    return held if dtype == "keep" else DTYPES[dtype]


def _check_lora_modules(source: Source, base: ModelFolder) -> None:
    """Raises ValueError when the LoRA is of other modules than the engines wrap, or not of all components."""
    if not source.lora:
        return
    absent = [name for name in base.components if name not in source.policy]
    if absent:
        raise ValueError(
            f"{source.path} has no LoRA of {', '.join(absent)}, and a checkpoint holds those of all components; --to merged "
            "takes it as it is"
        )
    for component in base.components.values():
        found, wanted = (
            set(source.lora.modules),
            set(component.model.plan.lora_modules(component.model.shapes)),
        )
        if found != wanted:
            raise ValueError(
                f"{source.path} is a LoRA of {len(found)} modules, the engines wrap {len(wanted)} of this model: only there "
                f"{sorted(found - wanted)[:4]}, only here {sorted(wanted - found)[:4]}; --to merged takes it as it is"
            )


def _check_copies(rest: OtherFiles, folder: Path) -> None:
    """Raises ValueError when a file that was copied is another."""
    for path in rest.files:
        original = rest.root / path
        if not filecmp.cmp(folder / path, original, shallow=False):
            raise ValueError(
                f"the copy of {original} is another file; the disk or the memory is at fault"
            )
