"""Serve one replica, until it is told to stop.

megadiff serve MODEL --flag …             says all by flags
megadiff serve CONFIG.yaml … key=value …  samples for the run of this config: the same settings
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megadiff.algorithms import build_algorithm
from megadiff.cli.console import show_crashes
from megadiff.config.load import load_config
from megadiff.config.validate import validate
from megadiff.process.network import address_towards
from megadiff.rollout.client.processes import environment_token
from megadiff.rollout.proof import check_token
from megadiff.rollout.server.server import serve
from megadiff.rollout.spec import (
    ReplicaSpec,
    add_flags,
    config_keys,
    config_spec,
    flag_of,
    read_spec,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 after SIGTERM or SIGINT, 2 for settings that cannot work, told on stderr."""
    # intermixed: key=value may stand behind a flag
    arguments = vars(_parser().parse_intermixed_args(argv))
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
    """Return the spec of a file, of a run's config, or of flags.

    Raises ValueError where a setting is given twice, and for none of the three.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    file = given.pop("spec", None)
    sources: list[str] = given.pop("sources")

    # Which of the two would count is not to be guessed.
    if file is not None and (given or sources):
        flags = ", ".join([*sources, *map(flag_of, given)])
        raise ValueError(f"--spec {file} has every setting; leave out {flags}, or --spec")
    if file is not None:
        return read_spec(file)
    if not sources:
        raise ValueError(
            "no model; give a diffusers pipeline folder, the CONFIG.yaml of a run, or --spec FILE"
        )
    first = Path(sources[0])
    if len(sources) > 1 or first.is_file() or first.suffix in (".yaml", ".yml"):
        return _spec_of_run(sources, given)
    return ReplicaSpec(model=first, **given)


def _spec_of_run(sources: Sequence[str], given: dict[str, Any]) -> ReplicaSpec:
    """Return the spec of a run's replica. given: what its config does not say, such as its name."""
    for name, key in config_keys().items():
        if name in given:
            raise ValueError(
                f"{flag_of(name)} {given[name]} beside a config, which has {key}; "
                f"give {key}=… instead, to the trainer too"
            )
    config = load_config(sources)
    validate(config, dp=1, on_policy=build_algorithm(config.algorithm).on_policy)

    # A launcher of several nodes names the trainer's: vLLM would take it for its own rendezvous.
    trainer = os.environ.pop("MASTER_ADDR", "")
    os.environ.pop("MASTER_PORT", None)
    if trainer and "host" not in given:
        given["host"] = address_towards(trainer)
    # A node has several replicas: each takes a free port, which the registry tells.
    return config_spec(config, **{"port": 0, **given})


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
    parser = argparse.ArgumentParser(
        prog="megadiff serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="MODEL | CONFIG.yaml key=value",
        help="a diffusers pipeline folder, or the config of the run that it samples for",
    )
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
