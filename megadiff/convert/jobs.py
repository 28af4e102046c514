"""Write what a conversion makes: a diffusers folder, a checkpoint, or LoRA files."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import yaml

from megadiff.checkpoint.run_folders import CONFIG, PROGRESS, merged_config, progress_record
from megadiff.convert import lora_files
from megadiff.convert.copying import Copier, Slot
from megadiff.convert.layouts import Box, ShardLayout
from megadiff.convert.model_folders import (
    ModelFolder,
    file_tensors,
    listed,
    open_model,
    rest_of,
    write_index,
)
from megadiff.convert.other_files import OtherFiles
from megadiff.convert.sources import Source, state_order
from megadiff.convert.stored_tensors import (
    StoredTensor,
    StoredTensors,
    cast,
    from_checkpoint,
    from_file,
    merged,
    prefixed,
    total_bytes,
)
from megadiff.tensors.shards import ShardFolder, ShardWriter, TensorBox
from megadiff.tensors.tensor_file import (
    TensorFile,
    TensorWriter,
    canonical_order,
    reserve_descriptors,
)
from megadiff.types import DTYPES


class Job(Protocol):
    """num_bytes: of the tensors that are written. num_copied: bytes of the files that go along."""

    num_bytes: int
    num_copied: int

    def write(self, folder: Path, copier: Copier) -> None:
        """Write into the folder. Raises ValueError and OSError."""

    def read_back(self, folder: Path) -> StoredTensors:
        """Open what write() left in the folder, under the names that it gave the copier."""


class ModelJob:
    """A diffusers folder like the base's, with other weights."""

    def __init__(self, source: Source, *, dtype: str) -> None:
        """dtype: `keep` is the base's, tensor by tensor. A LoRA of the source is merged."""
        self._base = _needed_base(source)
        self._merged: dict[str, set[str]] = {}  # component → its tensors that a LoRA is added to
        self._tensors: dict[str, StoredTensors] = {}
        for name, component in self._base.components.items():
            tensors = dict(component.tensors)
            policy = source.policy.get(name, {})
            changed = merged(tensors, policy, scale=source.lora.scale) if source.lora else policy
            self._merged[name] = set(changed) if source.lora else set()
            tensors |= changed
            self._tensors[name] = {
                key: cast(stored, _chosen_dtype(dtype, component.tensors[key].meta.dtype))
                for key, stored in tensors.items()
            }
        self.num_bytes = sum(map(total_bytes, self._tensors.values()))
        self._rest = rest_of(self._base)
        self.num_copied = self._rest.num_bytes

    def write(self, folder: Path, copier: Copier) -> None:
        self._rest.copy_to(folder)
        with ExitStack() as stack:
            for name, component in self._base.components.items():
                tensors = self._tensors[name]
                files = file_tensors(component, tensors)
                slots: dict[str, list[Slot]] = {}
                for file, metas in files.items():
                    metadata = component.opened[file].metadata
                    writer = TensorWriter(folder / component.where / file, metas, metadata=metadata)
                    stack.callback(writer.close)
                    slots |= {f"{name}.{key}": [Slot(file=writer, key=key)] for key in metas}
                copier.copy(prefixed(f"{name}.", tensors), slots)
                # Only now: what is merged is not computed before it is copied.
                self._check_merged(name, copier.not_finite)
                write_index(component, folder / component.where, files)

    def _check_merged(self, component: str, not_finite: set[str]) -> None:
        """Raise ValueError when a tensor that LoRA was added to is not finite now."""
        wrong = sorted(
            name for name in self._merged[component] if f"{component}.{name}" in not_finite
        )
        if wrong:
            raise ValueError(
                f"{self._base.components[component].folder} with the LoRA added is NaN or infinite "
                f"in {len(wrong)} tensors: {listed(wrong)}; the base or the LoRA holds such "
                "values, or alpha is too large"
            )

    def read_back(self, folder: Path) -> StoredTensors:
        _check_copies(self._rest, folder)
        tensors: dict[str, StoredTensor] = {}
        for name, component in open_model(folder).components.items():
            tensors |= prefixed(f"{name}.", component.tensors)
        return tensors


class CheckpointJob:
    """A checkpoint that a run can start from, as an engine would write it in a layout."""

    num_copied = 0

    def __init__(self, source: Source, layout: ShardLayout) -> None:
        self._source = source
        self._layout = layout
        base = _needed_base(source)
        _check_lora_modules(source, base)
        names = sorted(source.state, key=state_order(source))
        # Masters and moments are float32 whatever dtype the source's weights have.
        self._tensors = {name: cast(source.state[name], torch.float32) for name in names}
        self._boxes = _boxes(source, base, layout)
        num_ranks = len(self._boxes)
        # All files are open at once, as each tensor is cut for all ranks when it is read.
        reserve_descriptors(num_ranks, what=f"a checkpoint of {num_ranks} ranks, a file each,")
        self.num_bytes = total_bytes(self._tensors)

    def write(self, folder: Path, copier: Copier) -> None:
        slots: dict[str, list[Slot]] = {name: [] for name in self._tensors}
        writers = []
        with ExitStack() as stack:
            for rank, boxes in enumerate(self._boxes):
                tensor_boxes = self._tensor_boxes(boxes)
                writer = ShardWriter(
                    folder,
                    tensor_boxes,
                    rank=rank,
                    num_files=len(self._boxes),
                    values=self._source.values,
                )
                stack.callback(writer.file.close)
                writers.append(writer)
                for name, tensor_box in tensor_boxes.items():
                    slot = Slot(
                        file=writer.file,
                        key=name,
                        box=(tensor_box.offsets, tensor_box.local_shape),
                        fingerprints=writer.fingerprints,
                    )
                    slots[name].append(slot)
            copier.copy(self._tensors, slots)
            for writer in writers:
                writer.close()
        config = yaml.safe_dump(self._config(), sort_keys=False)
        (folder / CONFIG).write_text(config, encoding="utf-8")
        # Last: it holds digests of the files beside it.
        (folder / PROGRESS).write_bytes(progress_record(folder, self._source.progress))

    def _tensor_boxes(self, boxes: Mapping[str, Box]) -> dict[str, TensorBox]:
        """Return a rank's boxes of all tensors, moments among them. boxes: of the parameters."""
        tensor_boxes = {}
        for name, stored in self._tensors.items():
            parameter = name.rpartition("/")[2]
            if parameter in boxes:
                offsets, local_shape = boxes[parameter]
                tensor_boxes[name] = TensorBox(
                    tensor=name,
                    shape=stored.meta.shape,
                    offsets=offsets,
                    local_shape=local_shape,
                )
        return tensor_boxes

    def read_back(self, folder: Path) -> StoredTensors:
        return from_checkpoint(ShardFolder(folder))

    def _config(self) -> dict[str, object]:
        """Return the run's config with what is now another; of a diffusers source just that."""
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

    A model of several components has a folder for each, as both load one component at a time.
    """

    num_copied = 0

    def __init__(self, source: Source, *, with_peft: bool, dtype: str) -> None:
        assert source.lora, "convert() asks for LoRA files of a LoRA only"
        self._source = source
        self._lora = source.lora
        self._with_peft = with_peft
        metadata = lora_files.diffusers_metadata(self._lora)
        # File, prefix of its tensors' names, metadata.
        self._formats = [(lora_files.DIFFUSERS_WEIGHTS, lora_files.DIFFUSERS_PREFIX, metadata)]
        if with_peft:
            peft = (lora_files.PEFT_WEIGHTS, lora_files.PEFT_PREFIX, {"format": "pt"})
            self._formats.append(peft)
        self._tensors = {
            component: {
                name: cast(stored, _chosen_dtype(dtype, stored.meta.dtype))
                for name, stored in tensors.items()
            }
            for component, tensors in source.policy.items()
        }
        self.num_bytes = sum(map(total_bytes, self._tensors.values())) * len(self._formats)

    def write(self, folder: Path, copier: Copier) -> None:
        for component, lora_folder in self._folders(folder).items():
            lora_folder.mkdir(exist_ok=True)
            for file, prefix, metadata in self._formats:
                tensors = prefixed(prefix, self._tensors[component])
                metas = canonical_order({name: stored.meta for name, stored in tensors.items()})
                with ExitStack() as stack:
                    writer = TensorWriter(lora_folder / file, metas, metadata=metadata)
                    stack.callback(writer.close)
                    slots = {f"{component}/{name}": [Slot(file=writer, key=name)] for name in metas}
                    copier.copy(prefixed(f"{component}/", tensors), slots)
            if self._with_peft:
                config = lora_files.peft_config(self._lora, base=self._base_path(component))
                text = json.dumps(config, indent=2) + "\n"
                (lora_folder / lora_files.PEFT_CONFIG).write_text(text, encoding="utf-8")

    def read_back(self, folder: Path) -> StoredTensors:
        tensors: dict[str, StoredTensor] = {}
        for component, lora_folder in self._folders(folder).items():
            for name, _, _ in self._formats:
                file = TensorFile(lora_folder / name)
                tensors |= {f"{component}/{key}": from_file(file, key) for key in file.tensors}
        return tensors

    def _folders(self, folder: Path) -> dict[str, Path]:
        """Return component → the folder that its LoRA goes to."""
        policy = self._source.policy
        components = self._source.base.components if self._source.base else policy
        if list(components) == list(policy) and len(policy) == 1:
            return {component: folder for component in policy}
        return {component: folder / component for component in policy}

    def _base_path(self, component: str) -> Path | None:
        base = self._source.base
        if not base:
            return None
        return base.path if len(base.components) == 1 else base.components[component].folder


def _needed_base(source: Source) -> ModelFolder:
    if not source.base:
        raise ValueError(
            f"{source.path} is a LoRA without a model; name the model folder with --base"
        )
    return source.base


def _boxes(source: Source, base: ModelFolder, layout: ShardLayout) -> list[dict[str, Box]]:
    """Return for each rank: parameter (`transformer.<name>`) → its box."""
    ranks: list[dict[str, Box]] = []
    for component, tensors in source.policy.items():
        model = base.components[component].model
        trained = {name: stored.meta.shape for name, stored in tensors.items()}
        boxes = layout.boxes({**model.shapes, **trained}, model.plan, num_heads=model.num_heads)
        ranks = ranks or [{} for _ in boxes]
        for rank, boxes_of_rank in enumerate(boxes):
            ranks[rank] |= {f"{component}.{name}": box for name, box in boxes_of_rank.items()}
    return ranks


def _chosen_dtype(dtype: str, kept: torch.dtype) -> torch.dtype:
    return kept if dtype == "keep" else DTYPES[dtype]


def _check_lora_modules(source: Source, base: ModelFolder) -> None:
    """Raise ValueError unless the LoRA is of the modules that engines wrap, in all components."""
    if not source.lora:
        return
    absent = [name for name in base.components if name not in source.policy]
    if absent:
        raise ValueError(
            f"{source.path} has no LoRA of {', '.join(absent)}, and a checkpoint holds those of "
            "all components; --to merged takes it as it is"
        )
    modules = set(source.lora.modules)
    for component in base.components.values():
        wrapped = set(component.model.plan.lora_modules(component.model.shapes))
        if modules != wrapped:
            raise ValueError(
                f"{source.path} is a LoRA of {len(modules)} modules, the engines wrap "
                f"{len(wrapped)} of this model: only there {sorted(modules - wrapped)[:4]}, only "
                f"here {sorted(wrapped - modules)[:4]}; --to merged takes it as it is"
            )


def _check_copies(rest: OtherFiles, folder: Path) -> None:
    """Raise ValueError when a file that was copied is another."""
    for path in rest.files:
        original = rest.root / path
        # shallow=True would compare sizes and times, which copy2() copies.
        if not filecmp.cmp(folder / path, original, shallow=False):
            raise ValueError(
                f"the copy of {original} is another file; the disk or the memory is at fault"
            )
