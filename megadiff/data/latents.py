"""Captioned images as the trainer wants them: VAE latents and text embeddings, made once and kept on disk.

FOLDER/KEY/latents_RANK_NUMBER.safetensors   [n, L, C] float32, images in the source's order
           tokens_RANK_NUMBER.safetensors    [n, D], the embeddings of all captions' tokens, one caption after the other
           lengths_RANK_NUMBER.safetensors   [n] int32, tokens of each caption
           caption_index.safetensors         [images] int32, which caption belongs to an image
           captions.json, index.json         the captions, each once; what the folder was made from, its files' sizes
KEY is a hash of all that the numbers depend on. The folder gets its name when all of it is written, so that a folder
with the name is whole. Every rank encodes its share; equal captions are encoded once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megadiff.data.images import Block, ImageSource
from megadiff.data.pixels import ENLARGED
from megadiff.data.prompts import checked_text, parse_json, prompt_id
from megadiff.data.row_files import RowTable, RowWriter, write_json, write_tensor
from megadiff.models.adapter import ModelAdapter
from megadiff.parallel.collectives import (
    AgreedError,
    agreed,
    all_reduce_max,
    all_reduce_sums,
    broadcast_json,
)
from megadiff.parallel.mesh import Mesh
from megadiff.types import Prompt, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 1  # raised when the same data and model give other numbers or files
INDEX = "index.json"
ASIDE = ".writing_"
STALE_S = 6 * 3600.0  # a folder aside that nothing was written to for so long belongs to nobody
MEMORY_BYTES = 4 << 30
EMPTY_CAPTION = Prompt.negative_text
TEXTS_PER_CALL = 64
CALLS_PER_ROUND = 16
LOG_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """All that the cached numbers depend on. images, model: fingerprints. dtype: of the text encoder and embeddings."""

    images: str
    num_images: int
    model: str
    height: int
    width: int
    dtype: str
    format: int = FORMAT

    @property
    def name(self) -> str:
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()


class LatentDataset:
    """A finished cache folder. Data of less than 4 GiB is read into memory, more stays memory-mapped.

    captions: each once; the empty one, which stands for a dropped caption, is among them. caption_index: [images] int64.
    captions_digest: 16 hex digits, a hash of the images' captions in order: another for other data,
    the same for a copy.
    Raises ValueError when a file is missing or not whole.
    """

    def __init__(self, folder: Path, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self.captions: list[str] = _read_json(folder / "captions.json")
        self.caption_index = RowTable([folder / "caption_index.safetensors"]).whole().long()
        of_images = json.dumps(self.captions).encode() + self.caption_index.numpy().tobytes()
        self.captions_digest = hashlib.blake2b(of_images, digest_size=8).hexdigest()
        self._latents, self._tokens = _table(folder, "latents"), _table(folder, "tokens")
        self._lengths = _table(folder, "lengths").whole().long()
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._empty = self.captions.index(EMPTY_CAPTION)
        if self._latents.num_bytes + self._tokens.num_bytes < memory_bytes:
            self._latents.to_memory()
            self._tokens.to_memory()

    def __len__(self) -> int:
        return self._latents.shape[0]

    def latents(self, rows: Tensor) -> Tensor:
        """rows: [N] int64 → [N, L, C] float32, packed and normalised."""
        return self._latents.take(rows)

    def conditioning(self, rows: Tensor, drop: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Text of rows [N] int64; where drop [N] bool is True, that of the empty caption.

        Returns the P different captions among them as prompt_embeds [P, T, D] and prompt_mask [P, T] bool, padded to the
        longest, and index_N int64: which of them belongs to each row.
        """
        used_P, index_N = torch.where(drop, self._empty, self.caption_index[rows]).unique(
            return_inverse=True
        )
        lengths_P = self._lengths[used_P]
        place_T = torch.arange(int(lengths_P.max()))
        mask_PT = place_T < lengths_P[:, None]
        embeds_PTD = torch.zeros(*mask_PT.shape, self._tokens.shape[1], dtype=self._tokens.dtype)
        embeds_PTD[mask_PT] = self._tokens.take((self._starts[used_P, None] + place_T)[mask_PT])
        return {"prompt_embeds": embeds_PTD, "prompt_mask": mask_PT}, index_N


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
    """The source as latents and embeddings: from `folder` if they are there, else made and kept. Collective over ranks.

    folder: shared by all ranks. batch: images a call of the VAE. max_chars: of a caption, as data.max_prompt_chars.
    dtype: of the text encoder and embeddings, the model's own. The VAE runs in float32, and latents are kept in it: they
    are what the model learns to paint, and few bytes. Measured on latents of unit variance, the VAE in bfloat16 is off by
    0.006, TF32 convolutions (cuDNN's default) by 0.0003.
    Raises AgreedError on all ranks: an image or caption that is refused, a full disk. Nothing half-written is kept.
    """
    folder, group, is_first = Path(folder), mesh.cpu_group, mesh.rank == 0
    sampling = Sampling(height=height, width=width, num_inference_steps=1)
    agreed(lambda: adapter.validate(sampling), group)

    key = agreed(
        lambda: _checked_key(source, adapter, sampling, max_chars, dtype), group, here=is_first
    )
    whole = agreed(lambda: _is_whole(folder / key.name), group, here=is_first)
    name, whole = broadcast_json([key.name, whole] if is_first else None, source=0, group=group)
    if whole:
        logger.info("latents of %s are those of %s", source.name, folder / name)
        return agreed(lambda: LatentDataset(folder / name), group)

    aside = folder / broadcast_json(f"{ASIDE}{name}_{secrets.token_hex(4)}", source=0, group=group)
    try:
        num_bytes = 4 * len(source) * math.prod(adapter.latents_shape(sampling))
        agreed(lambda: _fresh_folder(aside, num_bytes), group, here=is_first)
        _encode_images(
            source, adapter, aside, sampling=sampling, device=device, mesh=mesh, batch=batch
        )
        _encode_captions(adapter, aside, dtype=dtype, device=device, mesh=mesh)
        agreed(lambda: _finish(aside, folder, key), group, here=is_first)
    except AgreedError:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return agreed(lambda: LatentDataset(folder / name), group)


def _checked_key(
    source: ImageSource,
    adapter: ModelAdapter,
    sampling: Sampling,
    max_chars: int,
    dtype: torch.dtype,
) -> CacheKey:
    """Raises ValueError for the first caption that is too long for data.max_prompt_chars or for the model."""
    for row, caption in enumerate(source.captions):
        checked_text(source.where(row), "caption", caption, max_chars)
    adapter.check_prompts(
        [Prompt(text=text, id=prompt_id(text, EMPTY_CAPTION)) for text in set(source.captions)]
    )
    return CacheKey(
        images=source.fingerprint,
        num_images=len(source),
        model=_model_fingerprint(adapter),
        height=sampling.height,
        width=sampling.width,
        dtype=str(dtype).removeprefix("torch."),
    )


def _model_fingerprint(adapter: ModelAdapter) -> str:
    """Of names, sizes and modification times of the files of all components that are not trained."""
    stamps = []
    for path in sorted(adapter.model_folder.glob("*/**/*")):
        if (
            path.is_file()
            and path.relative_to(adapter.model_folder).parts[0] not in adapter.components
        ):
            status = path.stat()
            stamps.append(
                f"{path.relative_to(adapter.model_folder)} {status.st_size} {status.st_mtime_ns}"
            )
    return hashlib.blake2b("\n".join(stamps).encode(), digest_size=16).hexdigest()


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
    """Writes this rank's latents, and the captions of its images as a list."""
    share = _share(len(source), mesh)
    writer, captions, num_enlarged = RowWriter(aside, "latents", mesh.rank), [], 0
    progress = _Progress("images", share, mesh)

    def encode_block(block: Block) -> None:
        nonlocal num_enlarged
        writer.add(encode(torch.from_numpy(block.pixels_BHWC)))
        captions.extend(block.captions)
        num_enlarged += block.num_enlarged
        progress.add(len(block.captions))

    def finish() -> None:
        writer.flush()
        write_json(aside / f"captions_{mesh.rank:05d}.json", captions)

    blocks = source.blocks(
        share.start, share.stop, size=batch, height=sampling.height, width=sampling.width
    )
    with ExitStack() as stack, closing(blocks):
        encoder = adapter.image_encoder(dtype=torch.float32, device=device)
        encode = agreed(lambda: stack.enter_context(encoder), mesh.cpu_group)
        _in_rounds(encode_block, blocks, mesh)
    agreed(finish, mesh.cpu_group)
    num_enlarged = round(all_reduce_sums({"enlarged": num_enlarged}, mesh.cpu_group)["enlarged"])
    if num_enlarged and mesh.rank == 0:
        logger.warning(
            "%s: %d of %d images are enlarged more than %g× to %d×%d (height×width), and blurred by it; leave them out "
            "or train at a smaller size",
            source.name, num_enlarged, len(source), ENLARGED, sampling.height, sampling.width,
        )  # fmt: skip


def _encode_captions(
    adapter: ModelAdapter, aside: Path, *, dtype: torch.dtype, device: torch.device, mesh: Mesh
) -> None:
    """Writes this rank's share of the different captions' tokens, and on rank 0 which caption belongs to which image."""
    captions = agreed(lambda: _written_captions(aside, mesh.world_size), mesh.cpu_group)
    texts = sorted(
        {EMPTY_CAPTION, *captions}, key=lambda text: (len(text), text)
    )  # equal lengths meet: less padding
    share = _share(len(texts), mesh)
    tokens, lengths = RowWriter(aside, "tokens", mesh.rank), RowWriter(aside, "lengths", mesh.rank)
    progress = _Progress("captions", share, mesh)

    def encode_some(start: int) -> None:
        embeds_BTD, mask_BT = encode(texts[start : min(start + TEXTS_PER_CALL, share.stop)])
        tokens.add(embeds_BTD[mask_BT])
        lengths.add(mask_BT.sum(dim=1, dtype=torch.int32))
        progress.add(len(mask_BT))

    def finish() -> None:
        tokens.flush()
        lengths.flush()
        if mesh.rank == 0:
            number = {text: number for number, text in enumerate(texts)}
            index = torch.tensor([number[caption] for caption in captions], dtype=torch.int32)
            write_tensor(aside / "caption_index.safetensors", index)
            write_json(aside / "captions.json", texts)

    with ExitStack() as stack:
        encoder = adapter.prompt_encoder(dtype=dtype, device=device)
        encode = agreed(lambda: stack.enter_context(encoder), mesh.cpu_group)
        _in_rounds(encode_some, iter(share[::TEXTS_PER_CALL]), mesh)
    agreed(finish, mesh.cpu_group)


def _in_rounds(action: Callable[[T], None], items: Iterator[T], mesh: Mesh) -> None:
    """action on each of this rank's items. After every few of them the ranks agree that none has failed."""

    def one_round() -> bool:
        num_done = 0
        for item in islice(items, CALLS_PER_ROUND):
            action(item)
            num_done += 1
        return num_done == CALLS_PER_ROUND

    more = True
    while more:
        mine = agreed(one_round, mesh.cpu_group)
        more = all_reduce_max({"more": float(mine)}, mesh.cpu_group)["more"] > 0


def _share(count: int, mesh: Mesh) -> range:
    """This rank's part of range(count); in the order of ranks they make up the whole."""
    return range(count * mesh.rank // mesh.world_size, count * (mesh.rank + 1) // mesh.world_size)


def _written_captions(aside: Path, world_size: int) -> list[str]:
    """The captions of all images, in the source's order."""
    files = [aside / f"captions_{rank:05d}.json" for rank in range(world_size)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(
            f"{aside} has no {', '.join(absent)}: latents need a folder that all nodes share"
        )
    return [caption for file in files for caption in _read_json(file)]


def _read_json(path: Path) -> Any:
    return parse_json(path, path.read_text(encoding="utf-8"))


def _is_whole(cache: Path) -> bool:
    """Whether there is such a cache and its files have the sizes they were written with."""
    if not cache.is_dir():
        return False
    try:
        sizes = _read_json(cache / INDEX)["files"]
        torn = [name for name, size in sizes.items() if (cache / name).stat().st_size != size]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        torn = [str(error)]
    if torn:
        logger.warning("%s is torn (%s) and is made again", cache, ", ".join(torn))
    return not torn


def _fresh_folder(aside: Path, num_bytes: int) -> None:
    """Make the folder, when there is room for the latents; remove what runs that were killed have left beside it."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    for left in aside.parent.glob(f"{ASIDE}*"):
        if time.time() - _last_change(left) > STALE_S:
            shutil.rmtree(left)
    free = shutil.disk_usage(aside.parent).free
    if num_bytes > free:
        raise ValueError(
            f"{aside.parent} has {free / 2**20:.1f} MiB free, the latents need {num_bytes / 2**20:.1f} MiB: make room"
        )
    aside.mkdir()


def _last_change(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # the run that writes it has just finished it
        return time.time()


def _finish(aside: Path, folder: Path, key: CacheKey) -> None:
    """Give the folder its name. A whole one that another run has finished meanwhile stays."""
    for file in aside.glob("captions_*.json"):
        file.unlink()
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    write_json(aside / INDEX, {"key": asdict(key), "files": sizes})
    cache = folder / key.name
    if _is_whole(cache):
        shutil.rmtree(aside)
        return
    if cache.exists():
        shutil.rmtree(cache)
    aside.rename(cache)


def _table(folder: Path, prefix: str) -> RowTable:
    return RowTable(sorted(folder.glob(f"{prefix}_[0-9]*.safetensors")))


class _Progress:
    """Tells every few seconds how far rank 0 is with its share, which is like that of the others."""

    def __init__(self, what: str, share: range, mesh: Mesh) -> None:
        self._what, self._total, self._mesh = what, len(share), mesh
        self._done, self._start = 0, time.monotonic()
        self._last = self._start

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._mesh.rank == 0 and (now - self._last > LOG_EVERY_S or self._done == self._total):
            self._last = now
            rate = self._done * self._mesh.world_size / (now - self._start)
            logger.info(
                "encoded %d of %d %s on each of %d ranks, together %.0f/s",
                self._done, self._total, self._what, self._mesh.world_size, rate,
            )  # fmt: skip
