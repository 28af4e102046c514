"""Judge the GPUs: is the driver new enough, do processes and GPUs reach each other's memory."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megadiff.doctor.finding import Finding, error, ok, skipped, warning
from megadiff.doctor.gpu_facts import GpuFacts, from_json
from megadiff.doctor.machine import GIB
from megadiff.doctor.probes import ProbeError, output_of, within
from megadiff.process.words import counted

DRIVER_FILE = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
# CUDA's major version → the least driver that all its minor versions run on
# (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility)
LEAST_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
READ_S = 5.0  # of a file that the driver writes
SMI_S = 20.0
PROBE_S = 90.0  # torch and CUDA start in 5 s, on a busy host in 30
LINKS_S = 120.0
LEAST_FREE = 0.9  # of a GPU's memory, beside other users
LEAST_CAPABILITY = (8, 0)  # bfloat16 in hardware: A100 and newer
SLOW_LINK_GBS = 100.0  # NVLink of H100 and H200 gives 300 and more, PCIe 10 to 50
SHOWN_PAIRS = 4


def has_gpus() -> bool:
    """Tell whether NVIDIA's driver shows a device to this process."""
    return any(DEVICES.glob("nvidia[0-9]*"))


def read_driver() -> str:
    """Return the version of the loaded driver, "" where nothing tells it."""
    with suppress(OSError):
        return driver_of(within(READ_S, lambda: DRIVER_FILE.read_text("utf-8")))
    # a sandbox may show the devices and not the file
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with suppress(ProbeError):
        return output_of(query, timeout_s=SMI_S).strip()
    return ""


def driver_of(text: str) -> str:
    """Find the version in /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module.*?\s(\d{3,}(?:\.\d+)+)", text)
    return match[1] if match else ""


def driver_finding(driver: str, torch_cuda: str | None, *, cuda_works: bool) -> Finding:
    """Compare the driver's version, "" where nothing tells it, with the least for torch's CUDA.

    torch_cuda: None for a CPU.
    cuda_works: whether CUDA started all the same, as with the libraries of forward compatibility.
    """
    if torch_cuda is None:
        loaded = driver or "NVIDIA's, of unknown version,"
        return error(
            "driver",
            f"{loaded} is loaded, but torch is built for CPUs",
            fix="rm -r .venv, then launch/setup.sh gpu",
        )
    if not re.fullmatch(r"\d+(\.\d+)+", driver):
        return skipped("driver", f"neither {DRIVER_FILE} nor nvidia-smi tells its version")
    least = LEAST_DRIVERS.get(torch_cuda.partition(".")[0])
    if least is None:
        return warning(
            "driver",
            f"{driver} with torch for CUDA {torch_cuda}; known are {', '.join(LEAST_DRIVERS)}",
            fix="see NVIDIA's table of CUDA and driver versions",
        )
    text = f"{driver}, torch's CUDA {torch_cuda} needs {least} or newer"
    if _numbers(driver) >= _numbers(least):
        return ok("driver", text)
    fix = f"install a driver of branch {least.partition('.')[0]} or newer on the host"
    if cuda_works:
        return warning("driver", f"{text}; CUDA starts all the same", fix=fix)
    return error("driver", text, fix=fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else ()


def gpu_findings(facts: GpuFacts) -> Iterator[Finding]:
    """Yield what to say of the devices, their memory, peer access and IPC."""
    if not facts.devices:
        yield error(
            "gpus",
            f"0 usable: {facts.cuda_error or 'torch sees none'}",
            fix="nvidia-smi says whether the driver works; check CUDA_VISIBLE_DEVICES",
        )
        return

    names = sorted({device.name for device in facts.devices})
    yield ok("gpus", f"{len(facts.devices)} x {' and '.join(names)}")
    yield from _old_gpus(facts)
    yield _memory(facts)
    yield _peers(facts)
    yield _ipc(facts)


def _old_gpus(facts: GpuFacts) -> Iterator[Finding]:
    for index, device in enumerate(facts.devices):
        if _numbers(device.capability) < LEAST_CAPABILITY:
            yield error(
                "gpus",
                f"GPU {index} has compute capability {device.capability}, bfloat16 needs 8.0",
                fix="take an A100 or newer, or leave it out by CUDA_VISIBLE_DEVICES",
            )


def _memory(facts: GpuFacts) -> Finding:
    fullest = min(facts.devices, key=lambda device: device.free_bytes / device.total_bytes)
    text = f"{fullest.free_bytes / GIB:.1f} of {fullest.total_bytes / GIB:.1f} GiB are free on "
    text += "the fullest GPU"
    if fullest.free_bytes >= LEAST_FREE * fullest.total_bytes:
        return ok("gpu memory", text)
    return warning(
        "gpu memory",
        f"{text}, {LEAST_FREE:.0%} should be",
        fix="nvidia-smi lists who uses it; end those, or choose others by CUDA_VISIBLE_DEVICES",
    )


def _peers(facts: GpuFacts) -> Finding:
    count = len(facts.devices)
    if count < 2:
        return skipped("peer access", "needs two GPUs, here is 1 GPU")
    num_pairs = count * (count - 1)
    num_without = len(facts.without_peer)
    text = f"{num_pairs - num_without} of {num_pairs} pairs of GPUs read each other's memory"
    if not num_without:
        return ok("peer access", text)
    pairs = ", ".join(f"{first} to {second}" for first, second in facts.without_peer[:SHOWN_PAIRS])
    return warning(
        "peer access",
        f"{text}; not so {pairs}. NCCL goes through host memory there",
        fix="nvidia-smi topo -p2p r; turn ACS and the IOMMU off in the BIOS, and give a virtual "
        "machine whole NVLink domains",
    )


def _ipc(facts: GpuFacts) -> Finding:
    if not facts.ipc_error:
        return ok("cuda ipc", "another process reads GPU memory, as sync.transport=shm does")
    return error(
        "cuda ipc",
        f"another process cannot read GPU memory: {facts.ipc_error}",
        fix="docker run --ipc=host; unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF, "
        "where one has expandable_segments:True; "
        "or sync.transport=http",
    )


def links_finding(gbs: float, *, num_gpus: int) -> Finding:
    """Compare an all-reduce's bus bandwidth with that of NVLink."""
    text = f"{gbs:.0f} GB/s in an all-reduce over {num_gpus} GPUs, {SLOW_LINK_GBS:.0f} are expected"
    if gbs >= SLOW_LINK_GBS:
        return ok("nccl links", text)
    return warning(
        "nccl links",
        f"{text} of NVLink",
        fix="nvidia-smi nvlink --status and nvidia-smi topo -m show the links; over PCIe alone "
        "prefer LoRA, or engine.backend=veomni with parallel.dp_replicate",
    )


def look_at_gpus(torch_cuda: str | None) -> tuple[GpuFacts, list[Finding]]:
    """Probe this host's GPUs in processes of their own. Returns what torch says, and findings."""
    driver = read_driver()
    if not driver and not has_gpus():
        return GpuFacts(), list(_without_gpus(torch_cuda))
    if torch_cuda is None:
        return GpuFacts(), [driver_finding(driver, torch_cuda, cuda_works=False)]

    try:
        facts = probe_gpus()
    except ProbeError as failure:
        fix = "nvidia-smi and `dmesg | grep -i nvrm` say what hangs; restart the host"
        hang = error("gpus", str(failure), fix=fix)
        return GpuFacts(), [driver_finding(driver, torch_cuda, cuda_works=False), hang]

    verdict = driver_finding(driver, torch_cuda, cuda_works=bool(facts.devices))
    links = _measured_links(len(facts.devices))
    return facts, [verdict, *gpu_findings(facts), links]


def _without_gpus(torch_cuda: str | None) -> Iterator[Finding]:
    reason = "no NVIDIA GPU here: neither a driver nor /dev/nvidia0"
    if torch_cuda:
        text = f"0 seen, but torch is built for CUDA {torch_cuda}, which needs 1"
        fix = "load NVIDIA's driver, or start the container with --gpus all"
        yield warning("gpus", text, fix=fix)
    else:
        yield skipped("gpus", f"{reason}; torch is built for CPUs")
    for name in ("driver", "peer access", "cuda ipc", "nccl links"):
        yield skipped(name, reason)


def probe_gpus() -> GpuFacts:
    """Ask torch in another process. Raises ProbeError."""
    text = output_of([sys.executable, "-m", "megadiff.doctor.gpu_probe"], timeout_s=PROBE_S)
    try:
        return from_json(text)
    except (json.JSONDecodeError, IndexError) as failure:
        raise ProbeError(f"the probe of the GPUs answered {text[:80]!r}, no JSON") from failure


def _measured_links(num_gpus: int) -> Finding:
    if num_gpus < 2:
        return skipped("nccl links", f"needs two GPUs, here is {counted(num_gpus, 'GPU')}")
    command = [sys.executable, "-m", "megadiff.doctor.links_probe", str(num_gpus)]

    try:
        gbs = float(output_of(command, timeout_s=LINKS_S).split()[-1])
    except (ProbeError, ValueError, IndexError) as failure:
        return error(
            "nccl links",
            f"no all-reduce over {num_gpus} GPUs: {failure}",
            fix="NCCL_DEBUG=INFO megadiff doctor; NCCL_P2P_DISABLE=1 shows whether peers are it",
        )

    return links_finding(gbs, num_gpus=num_gpus)
