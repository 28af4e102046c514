"""Run `megadiff prompts import FORMAT SRC OUT`: a public prompt set becomes a prompt file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.data.prompt_imports import FORMATS, import_rows
from megadiff.observe.text_files import write_whole
from megadiff.process.words import counted

SOURCES = "\n".join(f"  {name:<10}{source}" for name, (_, _, source) in FORMATS.items())


DESCRIPTION = """Bring a public prompt set into a file for data.prompts or eval.prompts.

Files of your own need no import:
  .txt      a prompt a line, UTF-8; blank lines are skipped, a line that starts with # is a prompt
  .jsonl    an object a line with "prompt"; other keys are columns for rewards
  .parquet  a row a prompt, with the same columns"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff prompts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="import")
    importer = commands.add_parser(
        "import",
        description="Write the prompts of a public repository's file as .jsonl for data.prompts.",
        epilog=f"formats:\n{SOURCES}\n\nexit codes: 0 done, 2 refused or not written",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importer.add_argument("format", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    importer.add_argument("src", type=Path, metavar="SRC")
    importer.add_argument("out", type=Path, metavar="OUT", help="a .jsonl; it appears when whole")
    importer.add_argument("--force", action="store_true", help="replace OUT where it exists")

    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Import the prompts and say how many there are; return 0, or 2 when they are refused."""
    args = build_parser().parse_args(argv)

    try:
        _check_out(args.src, args.out, force=args.force)
        rows = import_rows(args.format, args.src)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(args.out, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megadiff prompts: {error}\n")
        return 2
    sys.stdout.write(f"{args.out}: {counted(len(rows), 'prompt')}\n")

    return 0


def _check_out(src: Path, out: Path, *, force: bool) -> None:
    """Raise ValueError where OUT is no .jsonl, is SRC, or exists."""
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: its suffix is {out.suffix!r}, must be .jsonl, as it is read by")
    if out.resolve() == src.resolve():
        raise ValueError(f"{out} is what is read; name another file")
    if os.path.lexists(out) and (not force or not out.is_file()):
        raise ValueError(f"{out} exists; remove it, name another one, or give --force for a file")
