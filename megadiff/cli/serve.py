"""`megadiff serve MODEL`: one replica, until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megadiff.cli.console import show_crashes
from megadiff.rollout.client.processes import environment_token
from megadiff.rollout.proof import check_token
from megadiff.rollout.server.server import serve
from megadiff.rollout.spec import ReplicaSpec, add_flags, flag_of, read_spec


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after SIGTERM or SIGINT, 2 for settings that cannot work, told on stderr."""
    arguments = vars(_parser().parse_args(argv))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    try:
        token = read_token(arguments.pop("token_file"))
        serve(spec_of(arguments), token=token)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        # Ctrl-C is an ordinary end, as SIGTERM is.
        pass
    return 0


def spec_of(arguments: dict[str, Any]) -> ReplicaSpec:
    """Return the spec of a file, or of the flags. Raises ValueError for both, and for none."""
    given = {key: value for key, value in arguments.items() if value is not None}
    file = given.pop("spec", None)
    if file is None and "model" not in given:
        raise ValueError("no model; give a diffusers pipeline folder, or --spec FILE")

    if file is None:
        return ReplicaSpec(**given)

    # Which of the two would count is not to be guessed.
    if given:
        flags = ", ".join("MODEL" if name == "model" else flag_of(name) for name in given)
        raise ValueError(f"--spec {file} has every setting; leave out {flags}, or --spec")
    return read_spec(file)


def read_token(file: Path | None) -> str | None:
    """Return the token of the file, or of MEGADIFF_TOKEN; None where there is neither.

    Raises ValueError for a file that others may read, and for a token that no header can hold.
    """
    if file is None:
        return environment_token()

    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {file} cannot be read: {error}") from None

    # As ssh does with keys: any bit for group or others.
    if mode & 0o077:
        raise ValueError(
            f"--token-file {file} has mode {mode:04o}: others may read the token; chmod 600 {file}"
        )
    if not token:
        raise ValueError(f"--token-file {file} is empty; write the token into it")

    return check_token(token, source=f"--token-file {file}")


class _NoToken(argparse.Action):
    """Refuse --token, and any value that follows it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(
            "--token is gone: everybody on the host sees a command line; set MEGADIFF_TOKEN, or "
            "give --token-file FILE"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megadiff serve", description=__doc__)
    add_flags(parser)
    parser.add_argument(
        "--spec",
        type=Path,
        metavar="FILE",
        help="every setting as JSON, as a trainer writes it; in place of MODEL and flags",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the bearer token that clients must send; without it MEGADIFF_TOKEN does",
    )
    parser.add_argument("--token", action=_NoToken, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    show_crashes()
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # at once: the interpreter's own way out spends seconds on the engine's threads
