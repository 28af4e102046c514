"""Encode captioned images once, as VAE latents and text embeddings, and keep them on disk.

FOLDER/KEY/latents_RANK_NUMBER.safetensors   [n, L, C] float32, images in the source's order
           the captions' conditioning        by name, see encoded_texts.py
           caption_index.safetensors         [images] int32, the caption of each image
           captions.json                     the captions, each once
           index.json                        what the folder was made from, its files' sizes
KEY is a hash of all that the numbers depend on (cache_folder.py). Each rank encodes consecutive
images; equal captions are encoded once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megadiff.data.cache_folder import ASIDE, CacheKey, finish, is_whole, make_aside, read_json
from megadiff.data.encoded_texts import EncodedTexts, EncodedTextWriter
from megadiff.data.images import Block, ImageSource
from megadiff.data.pixels import ENLARGED
from megadiff.data.prompts import checked_text, digest_of, prompt_id
from megadiff.data.row_files import RowTable, RowWriter, row_table, write_json, write_tensor
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import (
    AgreedError,
    agreed,
    all_reduce_max,
    all_reduce_sums,
    read_once,
)
from megadiff.parallel.mesh import Mesh
from megadiff.types import Prompt, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")

MEMORY_BYTES = 4 << 30  # a cache below this is read whole: memory is faster to index than a file
EMPTY_CAPTION = Prompt.negative_text
TEXTS_PER_CALL = 64
CALLS_PER_ROUND = 16  # between two agreements, each of which waits for the slowest rank
LOG_EVERY_S = 10.0


class LatentDataset:
    """Read a finished cache folder: into memory below 4 GiB, else memory-mapped.

    captions: each once; the empty one, which stands for a dropped caption, is among them.
    caption_index: [images] int64.
    captions_digest: 16 hex digits, a hash of the images' captions in order: another for other data,
    the same for a copy.
    Raises ValueError when a file is missing or not whole.
    """

    def __init__(self, folder: Path, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self.captions: list[str] = read_json(folder / "captions.json")
        self.caption_index = RowTable([folder / "caption_index.safetensors"]).whole().long()
        # Captions stand for the images, whose bytes are not here any more.
        hashed = json.dumps(self.captions).encode() + self.caption_index.numpy().tobytes()
        self.captions_digest = hashlib.blake2b(hashed, digest_size=8).hexdigest()

        self._latents = row_table(folder, "latents")
        self._texts = EncodedTexts(folder)
        self._empty = self.captions.index(EMPTY_CAPTION)

        if self._latents.num_bytes + self._texts.num_bytes < memory_bytes:
            self._latents.to_memory()
            self._texts.to_memory()

    def __len__(self) -> int:
        return self._latents.shape[0]

    def latents(self, rows: Tensor) -> Tensor:
        """Return rows [N] int64 as [N, L, C] float32, packed and normalised."""
        return self._latents.take(rows)

    def conditioning(self, rows: Tensor, drop: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the text of rows [N] int64; where drop [N] bool is True, the empty caption.

        The P different captions among them are name → [P, …], as the prompt encoder gives them.
        index_N int64 says which of them belongs to each row.
        """
        captions_N = torch.where(drop, self._empty, self.caption_index[rows])
        captions_P, index_N = captions_N.unique(return_inverse=True)
        return self._texts.take(captions_P), index_N


def encode_dataset(
    source: ImageSource,
    adapter: ModelAdapter,
    *,
    folder: Path,
    height: int,
    width: int,
    max_chars: int,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
    batch: int,
) -> LatentDataset:
    """Return the source as latents and embeddings: those in `folder`, else new ones. Collective.

    folder: shared by all ranks. batch: images a call of the VAE. max_chars: of a caption.
    dtype: of the text encoder and the embeddings, the model's own.
    Raises AgreedError on all ranks for an image or caption that is refused and for a full disk;
    nothing half-written stays.
    """
    folder = Path(folder)
    group = mesh.cpu_group
    is_first = mesh.rank == 0
    sampling = Sampling(height=height, width=width, num_inference_steps=1)
    agreed(lambda: adapter.validate(sampling), group)

    def look() -> tuple[dict[str, Any], bool, str]:
        captions = [(source.where(row), text) for row, text in enumerate(source.captions)]
        _check_captions(captions, adapter, max_chars)
        key = CacheKey(
            images=source.fingerprint,
            num_images=len(source),
            model=_model_fingerprint(adapter),
            height=height,
            width=width,
            dtype=str(dtype).removeprefix("torch."),
        )
        return asdict(key), is_whole(folder / key.name), secrets.token_hex(4)

    # Rank 0 looks for all: ranks that disagreed would wait for each other in collectives.
    key_fields, whole, number = read_once(look, source=0, group=group, world=group)
    key = CacheKey(**key_fields)
    cache = folder / key.name
    if whole:
        logger.info("latents of %s are those of %s", source.name, cache)
        return agreed(lambda: LatentDataset(cache), group)

    # Another name each time: two runs may make the same cache at once.
    aside = folder / f"{ASIDE}{key.name}_{number}"
    try:
        num_bytes = 4 * len(source) * math.prod(adapter.latents_shape(sampling))
        agreed(lambda: make_aside(aside, num_bytes), group, here=is_first)
        _encode_images(
            source, adapter, aside, sampling=sampling, device=device, mesh=mesh, batch=batch
        )
        captions = agreed(lambda: _written_captions(aside, mesh.world_size), group)
        if not source.captions:  # blocks() alone knew them
            told = [(source.where(row), text) for row, text in enumerate(captions)]
            agreed(lambda: _check_captions(told, adapter, max_chars), group, here=is_first)
        _encode_captions(captions, adapter, aside, dtype=dtype, device=device, mesh=mesh)
        agreed(lambda: finish(aside, folder, key), group, here=is_first)
    except AgreedError:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return agreed(lambda: LatentDataset(cache), group)


def _check_captions(
    captions: Sequence[tuple[str, str]], adapter: ModelAdapter, max_chars: int
) -> None:
    """Raise ValueError for a caption too long for data.max_prompt_chars or for the model.

    captions: where each is from, and its text.
    """
    for where, text in captions:
        checked_text(where, "caption", text, max_chars)
    # Each once, as many data sets repeat captions.
    texts = {text for _, text in captions}
    adapter.check_prompts([Prompt(text=text, id=prompt_id(text, EMPTY_CAPTION)) for text in texts])


def _model_fingerprint(adapter: ModelAdapter) -> str:
    """Hash names, sizes and modification times of all files of components that are not trained."""
    stamps = []
    for path in sorted(adapter.model_folder.glob("*/**/*")):
        name = path.relative_to(adapter.model_folder)
        if path.is_file() and name.parts[0] not in adapter.components:
            status = path.stat()
            stamps.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return digest_of("\n".join(stamps))


def _encode_images(
    source: ImageSource,
    adapter: ModelAdapter,
    aside: Path,
    *,
    sampling: Sampling,
    device: torch.device,
    mesh: Mesh,
    batch: int,
) -> None:
    """Write this rank's latents, and the captions of its images as a list."""
    # Consecutive rows: files sorted by rank then hold the images in the source's order.
    rows = _local_range(len(source), mesh)
    writer = RowWriter(aside, "latents", mesh.rank)
    captions: list[str] = []
    num_enlarged = 0
    progress = _Progress("images", len(rows), mesh)

    def encode_block(block: Block) -> None:
        nonlocal num_enlarged
        writer.add(encode(torch.from_numpy(block.pixels_BHWC)))
        captions.extend(block.captions)
        num_enlarged += block.num_enlarged
        progress.add(len(block.captions))

    def flush() -> None:
        writer.flush()
        write_json(aside / f"captions_{mesh.rank:05d}.json", captions)

    # Closed at the end, also after an error: workers are still reading ahead then.
    blocks = source.blocks(
        rows.start, rows.stop, size=batch, height=sampling.height, width=sampling.width
    )

    with ExitStack() as stack, closing(blocks):
        # float32, whatever the model's dtype: latents of unit variance are off by 0.006 in bfloat16
        # and by 0.0003 with TF32 convolutions (cuDNN's default).
        encoder = adapter.image_encoder(dtype=torch.float32, device=device)
        encode = agreed(lambda: stack.enter_context(encoder), mesh.cpu_group)
        _in_rounds(encode_block, blocks, mesh)

    agreed(flush, mesh.cpu_group)
    num_enlarged = round(all_reduce_sums({"enlarged": num_enlarged}, mesh.cpu_group)["enlarged"])
    if num_enlarged and mesh.rank == 0:
        logger.warning(
            "%s: %d of %d images are enlarged more than %g× to %d×%d (height×width), and blurred "
            "by it; leave them out or train at a smaller size",
            source.name,
            num_enlarged,
            len(source),
            ENLARGED,
            sampling.height,
            sampling.width,
        )


def _encode_captions(
    captions: Sequence[str],
    adapter: ModelAdapter,
    aside: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> None:
    """Write this rank's part of the different captions, encoded, and rank 0 the index."""
    # Equal lengths meet in a call: less padding.
    texts = sorted({EMPTY_CAPTION, *captions}, key=lambda text: (len(text), text))

    rows = _local_range(len(texts), mesh)
    writer = EncodedTextWriter(aside, mesh.rank)
    progress = _Progress("captions", len(rows), mesh)

    def encode_texts(start: int) -> None:
        texts_B = texts[start : min(start + TEXTS_PER_CALL, rows.stop)]
        writer.add(encode(texts_B))
        progress.add(len(texts_B))

    def flush() -> None:
        writer.flush()
        if mesh.rank == 0:
            number_of = {text: number for number, text in enumerate(texts)}
            index = torch.tensor([number_of[caption] for caption in captions], dtype=torch.int32)
            write_tensor(aside / "caption_index.safetensors", index)
            write_json(aside / "captions.json", texts)

    with ExitStack() as stack:
        encoder = adapter.prompt_encoder(dtype=dtype, device=device)
        encode = agreed(lambda: stack.enter_context(encoder), mesh.cpu_group)
        _in_rounds(encode_texts, iter(rows[::TEXTS_PER_CALL]), mesh)
    agreed(flush, mesh.cpu_group)


def _in_rounds(action: Callable[[T], None], items: Iterator[T], mesh: Mesh) -> None:
    """Do the action on each of this rank's items.

    After every few of them the ranks agree that none has failed: a rank that fails alone would
    leave the others in a collective for ever.
    """

    def one_round() -> bool:
        num_done = 0
        # One by one: a block of images is large, and the source makes it when it is asked for.
        for item in islice(items, CALLS_PER_ROUND):
            action(item)
            num_done += 1
        return num_done == CALLS_PER_ROUND

    more = True
    while more:
        more_here = agreed(one_round, mesh.cpu_group)
        more = all_reduce_max({"more": float(more_here)}, mesh.cpu_group)["more"] > 0


def _local_range(count: int, mesh: Mesh) -> range:
    """Return this rank's part of range(count); in the order of ranks they make up the whole."""
    return range(count * mesh.rank // mesh.world_size, count * (mesh.rank + 1) // mesh.world_size)


def _written_captions(aside: Path, world_size: int) -> list[str]:
    """Return the captions of all images, in the source's order."""
    files = [aside / f"captions_{rank:05d}.json" for rank in range(world_size)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(
            f"{aside} has no {', '.join(absent)}: latents need a folder that all nodes share"
        )
    return [caption for file in files for caption in read_json(file)]


@dataclass
class _Progress:
    """Tell every few seconds how far rank 0 is; the others are about as far."""

    noun: str
    total: int
    mesh: Mesh
    done: int = 0
    start_s: float = field(default_factory=time.monotonic)
    last_s: float = field(default_factory=time.monotonic)  # of the last message

    def add(self, count: int) -> None:
        self.done += count
        now_s = time.monotonic()
        is_due = now_s - self.last_s > LOG_EVERY_S or self.done == self.total
        if self.mesh.rank == 0 and is_due:
            self.last_s = now_s
            logger.info(
                "encoded %d of %d %s on each of %d ranks, together %.0f/s",
                self.done,
                self.total,
                self.noun,
                self.mesh.world_size,
                self.done * self.mesh.world_size / (now_s - self.start_s),
            )
