"""Run a call in a fork of this process, whose imports are done: seconds less for each."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


class Forked:
    """A call in a fork that leads its own process group, with what is used of subprocess.Popen.

    The parent must only have imported: what it had started, such as threads or a CUDA context,
    would not survive. run: returns the exit code. log: gets what it prints.
    """

    def __init__(self, run: Callable[[], int], log: Path) -> None:
        self.log = log
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            code = run()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            # It must end here: the tool's own stack is below, with its clean-up.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode
