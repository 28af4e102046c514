"""Measure a GPU's power by NVML's energy counter, where there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


class PowerMeter:
    """Return the mean power between calls of pop().

    energy_j: joules from any beginning on; None where the GPU does not say.
    """

    def __init__(self, energy_j: Callable[[], float | None]) -> None:
        self._energy_j = energy_j
        self._last_j = energy_j()
        self._last_s = time.monotonic()

    def pop(self) -> float:
        """Return the mean watts since the last call; 0 where the counter says nothing."""
        now_j = self._energy_j()
        if now_j is None:
            return 0.0

        now_s = time.monotonic()
        watts = 0.0
        # A driver that is loaded again counts from 0.
        if self._last_j is not None and now_j > self._last_j:
            watts = (now_j - self._last_j) / max(now_s - self._last_s, 1e-3)
        self._last_j = now_j
        self._last_s = now_s
        return watts


def power_meter(device: torch.device) -> PowerMeter | None:
    """Return the meter of a GPU; None on a CPU, without NVML, or where it has no such counter."""
    if device.type != "cuda":
        return None

    try:
        # of nvidia-ml-py, which only the GPU set has
        import pynvml
    except ModuleNotFoundError:
        return None

    try:
        pynvml.nvmlInit()
        # By its uuid: CUDA_VISIBLE_DEVICES numbers GPUs differently.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

        def energy_j() -> float | None:
            try:
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            except pynvml.NVMLError:  # a lost GPU says so where it works, too
                return None

        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return PowerMeter(energy_j)
    except pynvml.NVMLError as error:
        logger.info("no figures of the GPU's power: %s", error)
        return None
