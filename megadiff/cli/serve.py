"""`megadiff serve MODEL`: one replica, until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.cli.console import show_crashes
from megadiff.rollout.proof import check_token
from megadiff.rollout.server.server import ServeConfig, serve


def main(argv: Sequence[str] | None = None) -> int:
    """0 after SIGTERM or SIGINT, 2 for settings that cannot work, with one line on stderr that says why."""
    arguments = vars(_parser().parse_args(argv))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        arguments["token"] = read_token(arguments.pop("token_file"))
        serve(ServeConfig(**arguments))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def read_token(file: Path | None) -> str | None:
    """Return the token of the file, or of MEGADIFF_TOKEN; None where there is neither.

    Raises ValueError for a file that others may read, and for a token that no header can hold.
    """
    if file is None:
        token = os.environ.get("MEGADIFF_TOKEN", "")
        return check_token(token) if token else None
    token = _read_private(file)
    if not token:
        raise ValueError(f"--token-file {file} is empty; write the token into it")
    return check_token(token, source=f"--token-file {file}")


def _read_private(file: Path) -> str:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {file} cannot be read: {error}") from None
    if mode & 0o077:
        raise ValueError(
            f"--token-file {file} has mode {mode:04o}: others may read the token; chmod 600 {file}"
        )
    return text.strip()


class _NoToken(argparse.Action):
    """Refuses --token, and any value that follows it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(
            "--token is gone: everybody on the host sees a command line; set MEGADIFF_TOKEN, or "
            "give --token-file FILE"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megadiff serve", description=__doc__)
    parser.add_argument("model", type=Path, help="a diffusers pipeline folder")
    parser.add_argument(
        "--name",
        help="how logs, the registry and the OpenAI routes call it; by default HOSTNAME-PORT",
    )
    parser.add_argument("--host", default="127.0.0.1", help="any but loopback needs a token")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free one")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the bearer token that clients must send; without it MEGADIFF_TOKEN does",
    )
    parser.add_argument("--token", action=_NoToken, help=argparse.SUPPRESS)
    parser.add_argument(
        "--registry", type=Path, metavar="DIR", help="announce DIR/<name>.json while serving"
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="sync.folder of a run with sync.transport=disk: serve its newest version",
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="workers (GPUs) that share the transformer's weights"
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="exit when this process does")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the transformer's blocks"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="matrix products of the blocks in FP8 (needs bfloat16)"
    )
    parser.add_argument(
        "--fp8-in-place",
        action="store_true",
        help="keep FP8 weights in place of the bfloat16 ones: half the memory, but every push must bring all weights",
    )
    parser.add_argument(
        "--float32-streams", action="store_true", help="as the run's model.float32_streams"
    )
    return parser


if __name__ == "__main__":
    show_crashes()
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # at once: the interpreter's own way out spends seconds on the engine's threads
