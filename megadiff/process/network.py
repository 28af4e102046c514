"""Find the address by which another host reaches this one, and the interface that has it.

`python -m megadiff.process.network HOST` prints both, for launch/torchrun.sh.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import psutil

ANY_PORT = 9  # nothing is sent there
LARGEST_PORT = 65535


def check_port(port: int) -> None:
    """Raise ValueError for a --port that is none; getaddrinfo() would take it modulo 65536."""
    if not 0 <= port <= LARGEST_PORT:
        raise ValueError(f"--port {port} must be from 0, for any free one, to {LARGEST_PORT}")


def address_towards(host: str) -> str:
    """Return this host's own address on the way to another one.

    Raises ValueError where the name is unknown or no way leads there.
    """
    try:
        *_, target = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        return source_address(target)
    except OSError as error:
        raise ValueError(
            f"this host, {socket.gethostname()}, finds no way to {host!r}: {error}; give a name or "
            "an address of the first node that this one can reach"
        ) from None


def source_address(target: tuple[Any, ...]) -> str:
    """Return this host's own address on the way to a socket address; nothing is sent.

    Connecting a UDP socket only asks the routing table. Raises OSError where no way leads there.
    """
    with socket.socket(address_family(target[0]), socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str:
    """Return the name of the network interface that has the address. Raises ValueError for none."""
    for name, rows in psutil.net_if_addrs().items():
        if any(row.address.partition("%")[0] == address for row in rows):
            return name
    raise ValueError(f"no network interface of {socket.gethostname()} has the address {address}")


if __name__ == "__main__":
    try:
        own_address = address_towards(sys.argv[1])
        sys.stdout.write(f"{own_address} {interface_of(own_address)}\n")
    except ValueError as error:
        sys.exit(f"error: {error}")
