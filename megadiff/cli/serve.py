"""`megadiff serve MODEL`: one replica, until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.cli.console import show_crashes
from megadiff.rollout.server import ServeConfig, serve


def main(argv: Sequence[str] | None = None) -> int:
    """0 after SIGTERM or SIGINT, 2 for settings that cannot work, with one line on stderr that says why."""
    arguments = vars(_parser().parse_args(argv))
    arguments["token"] = arguments["token"] or os.environ.get("MEGADIFF_TOKEN") or None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        serve(ServeConfig(**arguments))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megadiff serve", description=__doc__)
    parser.add_argument("model", type=Path, help="a diffusers pipeline folder")
    parser.add_argument("--name", help="how logs, the registry and the OpenAI routes call it; by default HOSTNAME-PORT")
    parser.add_argument("--host", default="127.0.0.1", help="any but loopback needs --token")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free one")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--token", help="bearer token that clients must send; also read from MEGADIFF_TOKEN")
    parser.add_argument("--registry", type=Path, metavar="DIR", help="announce DIR/<name>.json while serving")
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="sync.folder of a run with sync.transport=disk: serve its newest version",
    )
    parser.add_argument("--tp", type=int, default=1, help="workers (GPUs) that share the transformer's weights")
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="exit when this process does")
    parser.add_argument("--compile", action="store_true", help="torch.compile the transformer's blocks")
    parser.add_argument("--fp8", action="store_true", help="matrix products of the blocks in FP8 (needs bfloat16)")
    parser.add_argument(
        "--fp8-in-place",
        action="store_true",
        help="keep FP8 weights in place of the bfloat16 ones: half the memory, but every push must bring all weights",
    )
    parser.add_argument("--float32-streams", action="store_true", help="as the run's model.float32_streams")
    return parser


if __name__ == "__main__":
    show_crashes()
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # at once: the interpreter's own way out spends seconds on the engine's threads
