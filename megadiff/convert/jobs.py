"""Write what a conversion makes: a diffusers folder, a checkpoint, or LoRA files."""

from __future__ import annotations

import filecmp
import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import yaml

from megadiff.checkpoint.run_folders import CONFIG, PROGRESS, merged_config, progress_record
from megadiff.convert.copying import Copier, Slot
from megadiff.convert.layouts import LAYOUTS, Box, RankBoxes
from megadiff.convert.model_card import CARD, is_card, is_trained, model_card
from megadiff.convert.model_folders import (
    ModelFolder,
    file_tensors,
    listed,
    open_model,
    rest_of,
    whole_checkpoints,
)
from megadiff.convert.sources import Source, ordered_state
from megadiff.convert.weight_index import check_index, new_index, write_index
from megadiff.process.descriptors import reserve_descriptors
from megadiff.tensors import lora_files
from megadiff.tensors.shard_index import TensorBox
from megadiff.tensors.shards import ShardFolder, ShardWriter
from megadiff.tensors.stored_tensors import (
    StoredTensors,
    cast,
    from_checkpoint,
    from_file,
    merged,
    prefixed,
    total_bytes,
)
from megadiff.tensors.tensor_file import TensorFile, canonical_order
from megadiff.types import DTYPES

logger = logging.getLogger(__name__)


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
        self._merged: set[str] = set()  # `<component>.<name>` of what a LoRA is added to
        self._tensors: dict[str, StoredTensors] = {}

        for name, component in self._base.components.items():
            tensors = dict(component.tensors)
            policy = source.policy.get(name, {})
            changed = merged(tensors, policy, scale=source.lora.scale) if source.lora else policy
            if source.lora:
                self._merged |= prefixed(f"{name}.", component.by_keys(changed)).keys()
            tensors |= changed
            chosen = {
                key: cast(stored, _chosen_dtype(dtype, component.tensors[key].meta.dtype))
                for key, stored in tensors.items()
            }
            self._tensors[name] = component.by_keys(chosen) | component.constants

        self.num_bytes = sum(map(total_bytes, self._tensors.values()))
        self._source = source
        self._is_trained = is_trained(source)
        # In a trained model's folder they would be the weights before training.
        self._untrained = whole_checkpoints(self._base) if self._is_trained else []
        self._rest = rest_of(self._base, is_left_out=self._is_left_out)
        # Before anything is written: an index that cannot be made anew is refused here.
        self._files = {
            name: file_tensors(component, self._tensors[name])
            for name, component in self._base.components.items()
        }
        self._indices = {
            name: new_index(component, self._files[name])
            for name, component in self._base.components.items()
        }
        self.num_copied = self._rest.num_bytes

    def _is_left_out(self, path: Path) -> bool:
        return self._is_trained and (is_card(path) or path in self._untrained)

    def write(self, folder: Path, copier: Copier) -> None:
        self._rest.copy_to(folder)
        if self._untrained:
            logger.info(
                "not copied from %s, as the weights there are those before training: %s",
                self._base.path,
                listed([str(path) for path in self._untrained]),
            )
        if self._is_trained:
            card = model_card(self._source, dtype=_main_dtype(self._tensors))
            (folder / CARD).write_text(card, "utf-8")

        for name, component in self._base.components.items():
            prefix = f"{name}."
            target = folder / component.where
            tensors = prefixed(prefix, self._tensors[name])

            for file, metas in self._files[name].items():
                metadata = component.opened[file].metadata
                copier.copy_to_file(target / file, tensors, metas, prefix=prefix, metadata=metadata)
            if index := self._indices[name]:
                write_index(component, target, index)

            # Only now: what is merged is not computed before it is copied.
            wrong = sorted(self._merged & copier.not_finite)
            if wrong:
                raise ValueError(
                    f"{component.folder} with the LoRA added is NaN or infinite in {len(wrong)} "
                    f"tensors: {listed(wrong)}; the base or the LoRA holds such values, or alpha "
                    "is too large"
                )

    def read_back(self, folder: Path) -> StoredTensors:
        for path in self._rest.files:
            original = self._rest.root / path
            # shallow=True would compare sizes and times, which copy2() copies.
            if not filecmp.cmp(folder / path, original, shallow=False):
                raise ValueError(
                    f"the copy of {original} is another file; the disk or the memory is at fault"
                )

        for component in self._base.components.values():
            check_index(component, folder / component.where)

        tensors: StoredTensors = {}
        for name, component in open_model(folder, self._base.family).components.items():
            stored = component.by_keys(component.tensors) | component.constants
            tensors |= prefixed(f"{name}.", stored)
        return tensors


class CheckpointJob:
    """A checkpoint that a run can start from, as an engine would write it in a layout."""

    num_copied = 0

    def __init__(self, source: Source, *, backend: str, num_ranks: int) -> None:
        """backend: engine.backend. num_ranks: tp of megatron (at dp 1), dp of veomni."""
        self._source = source
        self._base = _needed_base(source)
        self._backend = backend
        _check_lora_modules(source, self._base)

        # Masters and moments are float32 whatever dtype the source's weights have.
        self._tensors = {
            name: cast(source.state[name], torch.float32) for name in ordered_state(source)
        }
        self._boxes = _boxes(source, self._base, backend, num_ranks)
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
                        box=tensor_box,
                        fingerprints=writer.fingerprints,
                    )
                    slots[name].append(slot)

            copier.copy(self._tensors, slots)
            # Only now all fingerprints are known, which the headers hold.
            for writer in writers:
                writer.close()

        config = yaml.safe_dump(self._config(), sort_keys=False)
        (folder / CONFIG).write_text(config, "utf-8")
        # Last: it holds digests of the files beside it.
        (folder / PROGRESS).write_bytes(progress_record(folder, self._source.progress))

    def _tensor_boxes(self, boxes: Mapping[str, Box]) -> dict[str, TensorBox]:
        """Return a rank's boxes of all tensors, moments among them. boxes: of the parameters."""
        tensor_boxes = {}

        for name, stored in self._tensors.items():
            parameter = name.rpartition("/")[2]
            # what tensor parallelism leaves whole has a box on the first rank only
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
        tp = len(self._boxes) if self._backend == "megatron" else 1
        changes: dict[str, dict[str, object]] = {
            "model": {"path": str(self._base.home.resolve()), "family": self._base.family},
            "engine": {"backend": self._backend},
            # dp 0 takes what sp and tp leave of the ranks that start from it.
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

        self._tensors: dict[str, StoredTensors] = {}
        for component, tensors in source.policy.items():
            self._tensors[component] = {
                name: cast(stored, _chosen_dtype(dtype, stored.meta.dtype))
                for name, stored in tensors.items()
            }
        self.num_bytes = sum(map(total_bytes, self._tensors.values())) * len(self._formats)

    def write(self, folder: Path, copier: Copier) -> None:
        for component, lora_folder in self._folders(folder).items():
            lora_folder.mkdir(exist_ok=True)
            for file, prefix, metadata in self._formats:
                named = prefixed(prefix, self._tensors[component])
                # As peft and diffusers order them, so that a file that they wrote comes back.
                metas = canonical_order({name: stored.meta for name, stored in named.items()})
                tensors = prefixed(f"{component}/", named)
                copier.copy_to_file(
                    lora_folder / file, tensors, metas, prefix=f"{component}/", metadata=metadata
                )

            if self._with_peft:
                base = self._source.base
                path = base.path if base else None
                if base and len(base.components) > 1:
                    path = base.components[component].folder
                config = lora_files.peft_config(self._lora, base=path)
                text = json.dumps(config, indent=2) + "\n"
                (lora_folder / lora_files.PEFT_CONFIG).write_text(text, "utf-8")

    def read_back(self, folder: Path) -> StoredTensors:
        tensors: StoredTensors = {}
        for component, lora_folder in self._folders(folder).items():
            for name, _, _ in self._formats:
                file = TensorFile(lora_folder / name)
                tensors |= {f"{component}/{key}": from_file(file, key) for key in file.tensors}
        return tensors

    def _folders(self, folder: Path) -> dict[str, Path]:
        """Return component → the folder that its LoRA goes to."""
        policy = self._source.policy
        components = self._source.base.components if self._source.base else policy
        # A model of one component needs no folder to say which it is.
        if list(components) == list(policy) and len(policy) == 1:
            return {component: folder for component in policy}
        return {component: folder / component for component in policy}


def _needed_base(source: Source) -> ModelFolder:
    if not source.base:
        raise ValueError(
            f"{source.path} is a LoRA without a model; name the model folder with --base"
        )
    return source.base


def _boxes(source: Source, base: ModelFolder, backend: str, num_ranks: int) -> RankBoxes:
    """Return for each rank: parameter (`transformer.<name>`) → its box."""
    ranks: RankBoxes = []

    for component, tensors in source.policy.items():
        model = base.components[component].model
        # The plan wants all parameters: a LoRA is cut as the weight that it changes.
        shapes = {**model.shapes, **{name: stored.meta.shape for name, stored in tensors.items()}}
        boxes = LAYOUTS[backend](shapes, model, num_ranks)
        # Only now: a number of ranks that is refused may be one that memory does not hold.
        ranks = ranks or [{} for _ in boxes]

        for boxes_of_all, boxes_of_component in zip(ranks, boxes, strict=True):
            for name, box in boxes_of_component.items():
                boxes_of_all[f"{component}.{name}"] = box

    return ranks


def _chosen_dtype(dtype: str, kept: torch.dtype) -> torch.dtype:
    return kept if dtype == "keep" else DTYPES[dtype]


def _main_dtype(components: Mapping[str, StoredTensors]) -> str:
    """Return torch's name of the dtype that most bytes of the components' weights have."""
    num_bytes: dict[torch.dtype, int] = defaultdict(int)
    for tensors in components.values():
        for stored in tensors.values():
            num_bytes[stored.meta.dtype] += stored.meta.num_bytes
    dtype = max(num_bytes, key=lambda dtype: num_bytes[dtype])
    return str(dtype).removeprefix("torch.")


def _check_lora_modules(source: Source, base: ModelFolder) -> None:
    """Raise ValueError unless the LoRA is of modules that engines can wrap, in all components."""
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
        others = modules.difference(component.model.plan.lora_modules(component.model.shapes))
        if others:
            raise ValueError(
                f"{source.path} is a LoRA of {len(modules)} modules, {len(others)} of which no "
                f"engine wraps: {sorted(others)[:4]}; --to merged takes it as it is"
            )
