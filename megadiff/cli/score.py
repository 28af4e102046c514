"""Serve one reward to the reward `remote` of runs in other environments or on other machines.

megadiff score CONFIG.yaml … [key=value …] --port P

Only the configs' section `reward` is read. Exit codes: 0 after SIGTERM or Ctrl-C, 2 for settings
that cannot work.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing

import torch

from megadiff.cli.console import log_to_stderr
from megadiff.config.load import load_rewards
from megadiff.rewards.base import Reward, RewardContext, build_reward
from megadiff.rewards.remote import TOKEN_VARIABLE
from megadiff.rewards.server import ScoreServer
from megadiff.rollout.proof import check_token, is_loopback


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until it is told to stop. Return the exit code."""
    # intermixed: key=value may stand behind a flag
    options = _parser().parse_intermixed_args(argv)
    log_to_stderr()
    # SIGTERM ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    try:
        token = _token(options.host)
        reward = _reward(options.sources, options.reward)
        # The address first: one that is taken is told before a model is loaded.
        with (
            closing(reward),
            ScoreServer(reward, host=options.host, port=options.port, token=token) as server,
        ):
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            try:
                reward.open(RewardContext(device=device))
            except Exception as error:  # user code may raise anything
                raise ValueError(f"reward {reward.name!r} failed in open(): {error}") from error
            server.server_activate()

            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{server.server_port}"
            sys.stdout.write(f"reward {reward.name!r} is served at {url}\n")
            sys.stdout.flush()
            server.serve_forever()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _token(host: str) -> str:
    """Return the token of the environment, '' without one. Raises ValueError where it is needed."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not is_loopback(host):
        raise ValueError(
            f"--host {host} is not on loopback, and {TOKEN_VARIABLE} is not set: anybody on the "
            "network could use the server; draw a token with: "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token and check_token(token, source=TOKEN_VARIABLE)


def _reward(sources: Sequence[str], name: str) -> Reward:
    """Build the named reward of the config, by default its only one. Raises ValueError."""
    configs = load_rewards(sources)
    if not name and len(configs) == 1:
        (name,) = configs
    if name not in configs:
        raise ValueError(
            f"--reward {name or 'is not given'}: choose 1 of the {len(configs)} rewards in "
            f"{' '.join(sources)}: {', '.join(sorted(configs))}"
        )
    return build_reward(name, configs[name])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="CONFIG.yaml key=value",
        help="yaml files with a section reward, and overrides",
    )
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"another address than loopback's needs a token in {TOKEN_VARIABLE}",
    )
    parser.add_argument(
        "--reward", default="", metavar="NAME", help="which one, where the config has several"
    )
    return parser
