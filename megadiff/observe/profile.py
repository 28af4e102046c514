"""Trace chosen steps with torch's profiler, with the step's stages as named ranges.

RUN/profile/step_000003/ gets rank_0.json.gz (open it in https://ui.perfetto.dev or
chrome://tracing), and a summary.md of rank 0's. A traced step computes the same bits as any other.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megadiff.observe.profile_table import STAGE, summarise, to_markdown
from megadiff.observe.step_folders import step_folder, step_name
from megadiff.observe.text_files import write_whole
from megadiff.observe.timers import Timers

logger = logging.getLogger(__name__)
PROFILE = "profile"  # under a run's folder
SUMMARY = "summary.md"


class StepProfile:
    """Trace the steps of observe.profile_steps on this rank; other steps pay nothing.

    timers: of the loop's stages, which become ranges of the trace. beside: entered around a traced
    step with its folder, to trace other processes as well.
    """

    def __init__(
        self,
        run_folder: Path,
        steps: Collection[int],
        *,
        timers: Timers,
        rank: int,
        device_type: str,
    ) -> None:
        self._folder = run_folder / PROFILE
        self._steps = frozenset(steps)
        self._timers = timers
        self._rank = rank
        self._on_gpu = device_type == "cuda"
        self.beside: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Trace the block for a chosen step, from 1. A trace that cannot be written only warns.

        Timers in the block do not count the profiler's own start and end.
        """
        if step not in self._steps:
            yield
            return

        folder = step_folder(self._folder, step)
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)

        with self.beside(folder), profile(activities=activities) as trace:
            self._timers.mark = lambda name: record_function(f"{STAGE}{name}")
            try:
                yield
            finally:
                self._timers.mark = None
            if self._on_gpu:
                torch.cuda.synchronize()  # kernels that still run belong to the step

        try:
            self._write(trace, folder, step)
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # the run itself can go on
            logger.warning("step %d was traced, but not written: %s", step, error)

    def _write(self, trace: profile, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{self._rank}.json.gz"
        trace.export_chrome_trace(str(path))
        if self._rank:
            return
        with gzip.open(path, "rb") as file:
            events = json.load(file)["traceEvents"]
        summary = summarise(events)
        write_whole(folder / SUMMARY, to_markdown(summary, title=f"{step_name(step)}, rank 0"))
        logger.info(
            "step %d is traced: %s explains %.1f %% of it",
            step,
            folder / SUMMARY,
            100 * summary.explained,
        )
