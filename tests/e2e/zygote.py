"""`python -m tests.e2e.zygote FD`: imports what a replica needs, then forks a process for every
order that comes over socket FD. See servers.Zygote, which talks to it in lines of JSON.
"""

from __future__ import annotations

import json
import multiprocessing.context
import os
import runpy
import signal
import socket
import sys
import traceback
from typing import NoReturn

from setproctitle import getproctitle

from tests.frozen import import_frozen

PRELOAD = [
    "vllm_omni.entrypoints.async_omni",
    "vllm_omni.entrypoints.openai.api_server",
    "vllm_omni.diffusion.diffusion_engine",
    "vllm.entrypoints.openai.api_server",
    "uvicorn",
    "megadiff.models.qwen_image.pipeline",
    "megadiff.models.qwen_image_edit.text",
    "megadiff.models.wan22.pipeline",
    "megadiff.rollout.worker.extension",
    "megadiff.rollout.server.routes",
]


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    # It looks for the command line beside the environment, which forked processes replace.
    os.environ["SPT_NOENV"] = "1"
    getproctitle()
    import_frozen(PRELOAD)
    # vllm-omni asks for new interpreters for its workers, which would import everything again.
    multiprocessing.context.SpawnProcess._Popen = staticmethod(  # type: ignore[assignment]
        multiprocessing.context.ForkProcess._Popen
    )
    alive: set[int] = set()
    with channel.makefile("rw") as lines:
        for line in lines:  # until the tests end
            order = json.loads(line)
            if "command" in order:
                answer = os.fork()
                if answer == 0:
                    channel.close()
                    _become(**order)
                alive.add(answer)
            else:
                pid, status = os.waitpid(order["pid"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                alive.discard(pid)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _become(command: list[str], log: str, environment: dict[str, str]) -> NoReturn:
    """What exec of `python …` would do.

    command: `-m`, a module and its arguments, or a script and its arguments.
    """
    code = 1
    try:
        for target, descriptor in ((os.devnull, 0), (log, 1), (log, 2)):
            os.dup2(os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = command[1:] if command[0] == "-m" else command
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # what the interpreter does with it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: the interpreter's own way out takes seconds with all that is imported
