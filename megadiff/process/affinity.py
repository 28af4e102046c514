"""Bind a process to the CPUs beside its GPUs, as the machine says which those are.

Memory that a rank copies to its GPU is then of the GPU's own NUMA node. Linux describes PCI devices
in /sys (Documentation/ABI/testing/sysfs-bus-pci): numa_node, -1 where it is unknown, and
local_cpulist.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)
PCI_DEVICES = Path("/sys/bus/pci/devices")


@cache
def start_cpus() -> frozenset[int]:
    """Return the CPUs that this process was started with: a batch system's choice.

    bind() narrows what sched_getaffinity() says from then on.
    """
    return frozenset(os.sched_getaffinity(0))


def bind(pid: int, gpus: Iterable[int], *, name: str = "this rank") -> None:
    """Bind a process to the CPUs of its GPUs' NUMA nodes.

    pid: 0 for this process. gpus: as torch counts them in this process. It gets the CPUs that this
    process was started with where the machine does not say, or those leave none of the others.
    """
    allowed = start_cpus()
    local = [local_cpus(pci_id(gpu)) for gpu in gpus]
    cpus = allowed & frozenset().union(*local)
    if not cpus or not all(local):
        cpus = allowed

    # a process may end meanwhile, and a thread
    with suppress(ProcessLookupError, FileNotFoundError):
        # a child inherits what this process is bound to, which is another GPU's
        if os.sched_getaffinity(pid) == cpus:
            return
        for thread in os.listdir(f"/proc/{pid or os.getpid()}/task"):
            os.sched_setaffinity(int(thread), cpus)
        text = "%s is bound to %d of %d CPUs, from %d to %d: those beside its GPU"
        logger.info(text, name, len(cpus), len(allowed), min(cpus), max(cpus))


def local_cpus(pci: str) -> frozenset[int]:
    """Return the CPUs of a PCI device's NUMA node, none where the machine does not say.

    pci: domain:bus:device.function, as in /sys.
    """
    try:
        node = int((PCI_DEVICES / pci / "numa_node").read_text())
        text = (PCI_DEVICES / pci / "local_cpulist").read_text().strip()
    except (OSError, ValueError):
        return frozenset()
    if node < 0 or not text:
        return frozenset()

    cpus: set[int] = set()
    for part in text.split(","):  # 0-31,64-95
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def pci_id(gpu: int) -> str:
    """Return a GPU's address as /sys names it, "" where torch does not tell."""
    import torch  # worker processes, which ask for their CPUs only, are spared it

    properties = torch.cuda.get_device_properties(gpu)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return ""
    domain, bus, device = (getattr(properties, name) for name in names)
    # its function is 0: others of the card are audio and USB
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
