"""The weights that a run starts from, read by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from megadiff.tensors.model_files import open_weights, weight_files
from megadiff.tensors.shards import Shard
from megadiff.tensors.stored_tensors import StoredTensor, listed
from megadiff.types import Shapes


class SourceFolder:
    """The weights of one diffusers component: one safetensors file, or several with an index.

    lora: the LoRA that training starts from, by the tensors' names; empty for a new one.
    Raises ValueError when there are no weights, an indexed file is missing, or one is not whole.
    """

    def __init__(self, folder: Path, lora: Mapping[str, StoredTensor] | None = None) -> None:
        self.folder = Path(folder)
        self.lora = lora or {}
        files = [open_weights(path) for path in weight_files(self.folder)]
        self._file_of = {name: file for file in files for name in file.keys()}

    def check_names(self, shapes: Shapes) -> None:
        """Raise ValueError for what is missing, extra or of another shape than in the model."""
        names = self._file_of.keys()
        problems = [f"missing {name}" for name in sorted(shapes.keys() - names)]
        problems += [f"not in the model: {name}" for name in sorted(names - shapes.keys())]
        for name in sorted(shapes.keys() & names):
            shape = tuple(self._file_of[name].get_slice(name).get_shape())
            if shape != tuple(shapes[name]):
                problems.append(f"{name} has shape {shape}, the model's is {tuple(shapes[name])}")

        if problems:
            raise ValueError(f"{self.folder} does not fit its config.json: {listed(problems)}")

    def read_into(self, name: str, shard: Shard) -> None:
        """Fill shard.local with its part of the tensor, cast to its dtype. Nothing else is read."""
        slices = tuple(
            slice(begin, begin + size)
            for begin, size in zip(shard.offsets, shard.local.shape, strict=True)
        )
        # a rank has nothing of a tensor that has fewer rows than there are ranks
        if shard.local.numel():
            shard.local.copy_(self._file_of[name].get_slice(name)[slices])

    def read_constants(self, module: nn.Module, names: Sequence[str]) -> None:
        """Read the module's buffers of these names, each whole and in the buffer's dtype."""
        for name in names:
            # code can compute it, but a file has it as it was rounded when it was saved
            module.get_buffer(name).copy_(self._file_of[name].get_tensor(name))
