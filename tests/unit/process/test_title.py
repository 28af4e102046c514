"""A process is named in ps, and its environment can be read all the same."""

import os
import subprocess
import sys

import psutil

PATH = os.pathsep.join(sys.path)
PROGRAM = """
from megadiff.process.title import set_title

set_title("a_run: rank 0")
print("named", flush=True)
input()
"""


def test_a_title_leaves_the_environment_readable() -> None:
    """By it orphans are found, and the process of a rank."""
    arguments = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": PATH, "RANK": "7"}, **arguments
    ) as child:
        assert child.stdout.readline() == "named\n"
        process = psutil.Process(child.pid)
        assert process.cmdline()[0] == "megadiff a_run: rank 0"
        assert process.environ()["RANK"] == "7"
        child.communicate("\n")
