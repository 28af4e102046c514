"""Convert weights between diffusers folders, checkpoints of either engine, and LoRA files.

A Job says what is written; `convert` runs it in a folder that appears whole or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from megadiff.convert.copying import Advance, Copier
from megadiff.convert.jobs import CheckpointJob, Job, LoraJob, ModelJob
from megadiff.convert.sources import Source, check_base, open_source
from megadiff.process.whole_folder import (
    check_destination,
    check_space,
    clear_up,
    sync_tree,
    whole_folder,
)
from megadiff.tensors.fingerprint import fingerprint
from megadiff.tensors.stored_tensors import StoredTensors, listed

logger = logging.getLogger(__name__)
TARGETS = ("diffusers", "megatron", "fsdp", "peft", "merged")
BACKENDS = {"megatron": "megatron", "fsdp": "veomni"}  # target → engine.backend
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # (what is done, bytes) → advance


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options.

    to: one of TARGETS. num_ranks: tp of megatron, dp of fsdp. dtype: keep | float32 | bfloat16, of
    weight files. step, base, raw, family: as of open_source. verify: read all back before dst
    appears. force: an old dst gives way. sync: dst is on the disk before it appears.
    """

    to: str
    num_ranks: int = 1
    dtype: str = "keep"
    step: int | None = None
    base: Path | None = None
    raw: bool = False
    family: str = ""
    verify: bool = False
    force: bool = False
    sync: bool = False


def convert(src: Path, dst: Path, options: Options, *, progress: Progress) -> None:
    """Write dst, which appears whole or not at all, and log the speed. src is only read.

    Raises ValueError for everything that a user can put right: what src is, what is wrong in it, a
    dst in the way, a disk that is full.
    """
    source = open_source(
        src, step=options.step, base=options.base, raw=options.raw, family=options.family
    )

    # Before dst is looked at: a killed process may have left the old one beside it.
    clear_up(dst)
    sources = [src, source.path, *([source.base.path] if source.base else [])]
    check_destination(dst, force=options.force, sources=sources)
    job = _choose_job(source, options)
    # Before anything is written: a disk that fills up after an hour would waste it.
    check_space(dst, job.num_bytes + job.num_copied)

    try:
        with whole_folder(dst, force=options.force) as folder:
            start = time.perf_counter()
            with progress("write", job.num_bytes) as advance:
                copier = Copier(advance=advance, verify=options.verify)
                job.write(folder, copier)
                if options.sync:
                    sync_tree(folder)  # within the seconds that are told
            # Without the verification, which writes nothing.
            seconds = time.perf_counter() - start
            if copier.not_finite:
                logger.warning(
                    "warning: %s holds NaN or infinity in %d tensors, which are written as they "
                    "are: %s",
                    src,
                    len(copier.not_finite),
                    listed(sorted(copier.not_finite)),
                )
            if options.verify:
                with progress("verify", job.num_bytes) as advance:
                    _verify(copier.fingerprints, job.read_back(folder), dst, advance=advance)
    except OSError as error:  # most often a disk that others fill meanwhile
        raise ValueError(
            f"{dst} could not be written: {error}; what was there is as it was, and so is {src}"
        ) from error

    gib = job.num_bytes / 2**30
    # From the first read to the last write.
    size = f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"
    logger.info("%s in %.2f s, %.2f GiB/s", size, seconds, gib / seconds)


def _choose_job(source: Source, options: Options) -> Job:
    to = options.to
    if to in BACKENDS:
        if options.raw:
            raise ValueError(
                f"--raw leaves out the running average, and a checkpoint (--to {to}) keeps it "
                "beside the weights; leave --raw out, or convert to diffusers"
            )
        if options.dtype == "bfloat16":
            raise ValueError(
                f"--dtype bfloat16: checkpoints (--to {to}) hold float32, of which engines make "
                "what they use"
            )
        return CheckpointJob(source, backend=BACKENDS[to], num_ranks=options.num_ranks)

    if to in ("peft", "merged") and not source.lora:
        raise ValueError(f"{source.path} holds whole weights and no LoRA; give --to diffusers")
    if to == "peft" or (to == "diffusers" and source.lora):
        return LoraJob(source, with_peft=to == "peft", dtype=options.dtype)

    # A model with other weights below would be one that nobody trained.
    check_base(source, is_named=options.base is not None)
    return ModelJob(source, dtype=options.dtype)


def _verify(
    expected: Mapping[str, str], tensors: StoredTensors, dst: Path, *, advance: Advance
) -> None:
    """Raise ValueError unless the tensors have the expected fingerprints."""
    actual = {}
    for name, stored in tensors.items():
        tensor = stored.read()
        actual[name] = fingerprint(tensor)
        advance(tensor.nbytes)

    # Both ways: a tensor too many is as wrong as one that is missing.
    names = expected.keys() | actual.keys()
    wrong = sorted(name for name in names if expected.get(name) != actual.get(name))
    if wrong:
        raise ValueError(
            f"{dst} would hold other tensors than were read, {len(wrong)} of {len(expected)}: "
            f"{', '.join(wrong[:5])}; the disk or the memory is at fault, nothing was written"
        )
