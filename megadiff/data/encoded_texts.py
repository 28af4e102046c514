"""Keep encoded captions in a cache folder, under the names that a family's prompt encoder gives.

whole.NAME_RANK_NUMBER.safetensors    [captions, …] of a tensor without a mask
tokens.NAME_RANK_NUMBER.safetensors   [tokens, …] of one with a mask, caption after caption
lengths.MASK_RANK_NUMBER.safetensors  [captions] int32, tokens of each caption
So padding takes no room, and a caption is the same whatever it was encoded together with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megadiff.data.row_files import RowTable, RowWriter, row_tables
from megadiff.models.conditioning import mask_of
from megadiff.types import Shape

WHOLE = "whole."
TOKENS = "tokens."
LENGTHS = "lengths."


class EncodedTextWriter:
    """Write this rank's part of the captions, in their order."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._writers: dict[str, RowWriter] = {}
        self._shapes: dict[str, Shape] = {}  # of a row

    def add(self, encoded: Mapping[str, Tensor]) -> None:
        """Take what a prompt encoder gives for some captions, by name, each tensor [B, …].

        Raises ValueError for a tensor without a mask whose rows differ in shape between calls.
        """
        for name, value in encoded.items():
            mask_BT = encoded.get(mask_of(name))
            if mask_BT is None:
                self._add(f"{WHOLE}{name}", value)
            elif name == mask_of(name):
                self._add(f"{LENGTHS}{name}", mask_BT.sum(dim=1, dtype=torch.int32))
            else:
                self._add(f"{TOKENS}{name}", value[mask_BT])  # without the padding

    def _add(self, prefix: str, rows: Tensor) -> None:
        shape = tuple(rows.shape[1:])
        first = self._shapes.setdefault(prefix, shape)
        if shape != first:
            name = prefix.removeprefix(WHOLE)
            raise ValueError(
                f"the prompt encoder gives {name} in rows of {list(first)} and of {list(shape)}; "
                f"give it a {mask_of(name)}, or one length for all texts"
            )
        if prefix not in self._writers:
            self._writers[prefix] = RowWriter(self._folder, prefix, self._rank)
        self._writers[prefix].add(rows)

    def flush(self) -> None:
        """Write what is left."""
        for writer in self._writers.values():
            writer.flush()


class EncodedTexts:
    """Read the captions of a finished cache folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError when a file cannot be read."""
        self._whole = row_tables(folder, WHOLE)
        self._tokens = row_tables(folder, TOKENS)
        lengths = row_tables(folder, LENGTHS)
        self._lengths = {name: table.whole().long() for name, table in lengths.items()}
        tables = (*self._whole.values(), *self._tokens.values())
        self.num_bytes = sum(table.num_bytes for table in tables)

    def to_memory(self) -> None:
        """Read all files now."""
        for table in (*self._whole.values(), *self._tokens.values()):
            table.to_memory()

    def take(self, captions_P: Tensor) -> dict[str, Tensor]:
        """Return captions [P] int64 as a conditioning: name → [P, …].

        Tensors that a mask belongs to are padded with zeros to the longest of these captions.
        """
        conditioning = {name: table.take(captions_P) for name, table in self._whole.items()}
        for mask_name, lengths in self._lengths.items():
            lengths_P = lengths[captions_P]
            starts_P = (lengths.cumsum(0) - lengths)[captions_P]
            token_T = torch.arange(int(lengths_P.max()))
            mask_PT = token_T < lengths_P[:, None]
            rows = (starts_P[:, None] + token_T)[mask_PT]

            conditioning[mask_name] = mask_PT
            for name, table in self._tokens.items():
                if mask_of(name) == mask_name:
                    conditioning[name] = _padded(table, rows, mask_PT)
        return conditioning


def _padded(table: RowTable, rows: Tensor, mask_PT: Tensor) -> Tensor:
    """Return the table's rows where the mask is True, in its order, and zeros elsewhere."""
    values = torch.zeros(*mask_PT.shape, *table.shape[1:], dtype=table.dtype)
    values[mask_PT] = table.take(rows)
    return values
