"""Run `megadiff convert SRC DST --to FORMAT`: weights from one format or layout into another."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megadiff.convert.convert import TARGETS, Options, convert
from megadiff.convert.copying import Advance
from megadiff.process.sigterm import ended_by_sigterm

DESCRIPTION = """Convert weights, tensor by tensor: at most two are in memory.

SRC   one of:
      - a diffusers pipeline folder, its transformer's folder, or one .safetensors file of that
      - a run or one of its checkpoints, of either engine and any layout
      - a peft folder or a diffusers LoRA file; for a model of several trained components (Wan2.2's
        experts) a folder of such folders, each named as its component
DST   a folder to create. It appears when it is whole. SRC is only read."""
FORMATS = """formats:
  diffusers   a pipeline folder where SRC or its base is one, else a component's; of LoRA weights
              diffusers' LoRA file
  megatron    a checkpoint in the layout of --tp N, with optimizer state where SRC has it
  fsdp        a checkpoint in the layout of --dp N
  peft        LoRA weights as a folder that peft and diffusers load
  merged      base + LoRA as a diffusers folder

A checkpoint is started from with `megadiff train … checkpoint.resume=DST`.
exit codes: 0 done, 2 refused or not written, 143 stopped by SIGTERM"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff convert",
        description=DESCRIPTION,
        epilog=FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    parser.add_argument("src", type=Path, metavar="SRC")
    parser.add_argument("dst", type=Path, metavar="DST")
    parser.add_argument("--to", choices=TARGETS, default="diffusers", help="by default diffusers")

    parser.add_argument("--tp", type=_count, help="megatron: tensor-parallel ranks")
    parser.add_argument("--dp", type=_count, help="fsdp: data-parallel ranks")
    parser.add_argument(
        "--step", type=int, help="of a run's checkpoints that of this step; by default the newest"
    )
    parser.add_argument(
        "--base",
        type=Path,
        help="the model folder of a LoRA or checkpoint; by default the run's model.path",
    )
    parser.add_argument(
        "--family",
        default="",
        metavar="MODULE:CLASS",
        help="of the model; by default the run's model.family, or a registered one",
    )

    parser.add_argument(
        "--dtype",
        choices=("keep", "float32", "bfloat16"),
        default="keep",
        help="of the weights in diffusers' and peft's files; keep (default): as the base model has "
        "them, of a LoRA as SRC has",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="not the running average of the weights, but the last ones",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read DST back before it appears, and compare fingerprints",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace what DST holds, once the new one is whole"
    )
    parser.add_argument(
        "--sync",
        action="store_true",
        help="wait until DST is on the disk, which cp does not do either",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, which names DST on stdout.

    Returns 0, or 2 with the reason on stderr. SIGTERM unwinds and exits with 143.
    """
    arguments = vars(build_parser().parse_args(argv))
    src = arguments.pop("src")
    dst = arguments.pop("dst")

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    num_threads_before = torch.get_num_threads()

    # Two threads convert, each for itself; more would fight with them.
    torch.set_num_threads(1)
    # Tensors in huge pages: the kernel clears each new page, which in small ones takes as long as
    # writing it. torch reads this when it first allocates on the CPU.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

    try:
        with ended_by_sigterm():  # so that nothing half-written is left
            convert(src, dst, _options(**arguments), progress=_bar)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        torch.set_num_threads(num_threads_before)

    sys.stdout.write(f"{dst}\n")
    return 0


def _options(*, to: str, tp: int | None, dp: int | None, **others: Any) -> Options:
    for flag, num_ranks, target in (("tp", tp, "megatron"), ("dp", dp, "fsdp")):
        if num_ranks is not None and to != target:
            raise ValueError(f"--{flag} {num_ranks} is for --to {target}, not for --to {to}")
        if num_ranks is None and to == target:
            raise ValueError(f"--to {target} needs --{flag} N, the number of ranks")
    return Options(to=to, num_ranks=tp or dp or 1, **others)


@contextmanager
def _bar(task: str, num_bytes: int) -> Iterator[Advance]:
    """Show a progress bar with GiB/s on stderr, where that is a terminal."""
    with tqdm(
        total=num_bytes, desc=task, unit="iB", unit_scale=True, unit_divisor=1024, disable=None
    ) as bar:
        yield bar.update


def _count(text: str) -> int:
    # Not int(): it takes -1, which would be refused without a word on the flag.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)
