"""A replica, and what it spawns, imports no Transformer Engine, be one installed or not."""

import os
import subprocess
import sys
from pathlib import Path

from tests.transformer_engine import deadly_transformer_engine

PROGRAM = """
import multiprocessing, sys
from megadiff.rollout.server.absent import hide_transformer_engine

def look(queue):
    import transformer_engine
    queue.put(hasattr(transformer_engine, "pytorch"))

if __name__ == "__main__":
    if sys.argv[1] == "hide":
        hide_transformer_engine()
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    child = spawn.Process(target=look, args=(queue,))
    child.start()
    child.join()
    print(child.exitcode, None if queue.empty() else queue.get())
"""


def test_a_spawned_process_finds_none(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join(map(str, (deadly_transformer_engine(tmp_path), *sys.path)))
    for argument, answer in (("hide", "0 False"), ("show", "70 None")):
        done = subprocess.run(
            [sys.executable, str(script), argument],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == answer, done.stderr
