"""Trace what a worker does, with torch's profiler, from one request of the trainer to another."""

from __future__ import annotations

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class WorkerTrace:
    """Hold the trace that runs, if any."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def begin(self) -> None:
        """Trace from now on; one that runs is dropped."""
        self.drop()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # A worker within the server's process samples in another thread than it is asked in.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._running = profile(activities=activities, experimental_config=every_thread)
        self._running.start()

    def end(self, path: str) -> None:
        """Write the trace to `path`, which ends in .json.gz. Raises ValueError where none runs."""
        trace = self._running
        if trace is None:
            raise ValueError("no trace is running; begin one first")
        self.drop()
        trace.export_chrome_trace(path)

    def drop(self) -> None:
        """End the trace, if one runs."""
        if self._running is not None:
            self._running.stop()
        self._running = None
