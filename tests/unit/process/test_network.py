"""The address by which others reach this host, and its interface."""

import subprocess
import sys

import pytest

from megadiff.process.network import address_towards, interface_of


def test_the_way_to_this_host_is_its_own_loopback():
    assert address_towards("localhost") in ("127.0.0.1", "::1")
    assert interface_of("127.0.0.1") == "lo"


def test_what_is_not_there_is_told():
    with pytest.raises(ValueError, match="finds no way to 'no-such-host.invalid'"):
        address_towards("no-such-host.invalid")
    with pytest.raises(ValueError, match="has the address 192.0.2.1"):
        interface_of("192.0.2.1")


def test_it_is_printed_for_the_launcher():
    command = [sys.executable, "-m", "megadiff.process.network"]
    done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "127.0.0.1 lo\n")
    done = subprocess.run([*command, "no-such-host.invalid"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: this host, ")
