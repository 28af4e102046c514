"""The doctor on GPUs, by facts as drivers and torch report them; the probes' code on a CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megadiff.doctor import gpus, links_probe
from megadiff.doctor.finding import Finding
from megadiff.doctor.gpu_facts import GpuDevice, GpuFacts, from_json
from megadiff.doctor.machine import GIB
from megadiff.doctor.probes import output_of

# /proc/driver/nvidia/version of a proprietary and of an open kernel module
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42 2024"
OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
H100 = GpuDevice(
    name="NVIDIA H100 80GB HBM3",
    total_bytes=85 * 10**9,
    free_bytes=84 * 10**9,
    capability="9.0",
)
HOST = GpuFacts(devices=(H100,) * 4)


def _by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    by_name = {finding.name: finding for finding in findings}
    for finding in by_name.values():
        assert bool(finding.fix) == (finding.status in ("error", "warning")), finding
    return by_name


def test_old_driver() -> None:
    assert gpus.driver_of(OPEN) == "580.95.05"
    assert gpus.driver_of(PROPRIETARY) == "535.161.08"
    assert gpus.driver_of("") == ""

    old = gpus.driver_of(PROPRIETARY)
    finding = gpus.driver_finding(old, "13.0", cuda_works=False)
    assert finding.status == "error"
    assert "535.161.08, torch's CUDA 13.0 needs 580.65.06 or newer" in finding.text
    assert "branch 580 or newer" in finding.fix
    # by the libraries of forward compatibility, which a container may bring
    assert gpus.driver_finding(old, "13.0", cuda_works=True).status == "warning"
    assert gpus.driver_finding(old, "12.8", cuda_works=True).status == "ok"
    new = gpus.driver_of(OPEN)
    assert gpus.driver_finding(new, "13.0", cuda_works=True).status == "ok"
    for_cpus = gpus.driver_finding(new, None, cuda_works=False)
    assert "torch is built for CPUs" in for_cpus.text
    assert "setup.sh gpu" in for_cpus.fix
    untold = gpus.driver_finding("", "13.0", cuda_works=True)
    assert untold.status == "skipped"
    unknown = gpus.driver_finding(new, "14.1", cuda_works=True)
    assert unknown.status == "warning"


def test_whole_host() -> None:
    found = _by_name(gpus.gpu_findings(HOST))
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["gpus"].text == "4 x NVIDIA H100 80GB HBM3"
    assert "12 of 12 pairs" in found["peer access"].text


def test_no_peer_access() -> None:
    found = _by_name(gpus.gpu_findings(replace(HOST, without_peer=((0, 1), (1, 0)))))
    peers = found["peer access"]
    assert peers.status == "warning"
    assert "10 of 12 pairs" in peers.text and "not so 0 to 1, 1 to 0" in peers.text
    assert "ACS" in peers.fix
    alone = list(gpus.gpu_findings(replace(HOST, devices=(H100,))))
    assert [finding.name for finding in alone if finding.status == "skipped"] == ["peer access"]


def test_no_ipc() -> None:
    found = _by_name(gpus.gpu_findings(replace(HOST, ipc_error="CUDA error: invalid argument")))
    assert found["cuda ipc"].status == "error"
    assert "invalid argument" in found["cuda ipc"].text
    assert "--ipc=host" in found["cuda ipc"].fix
    assert "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF," in found["cuda ipc"].fix


def test_cuda_that_does_not_start() -> None:
    (finding,) = gpus.gpu_findings(GpuFacts(cuda_error="CUDA unknown error"))
    assert (finding.name, finding.status) == ("gpus", "error")
    assert "0 usable: CUDA unknown error" in finding.text


def test_full_and_old_gpus() -> None:
    busy = replace(H100, free_bytes=20 * GIB)
    found = _by_name(gpus.gpu_findings(replace(HOST, devices=(H100, busy))))
    assert "20.0 of 79.2 GiB are free" in found["gpu memory"].text
    assert found["gpu memory"].status == "warning"
    old = replace(H100, capability="7.5")
    found = _by_name(gpus.gpu_findings(replace(HOST, devices=(H100, old))))
    assert found["gpus"].text == "GPU 1 has compute capability 7.5, bfloat16 needs 8.0"


def test_slow_links() -> None:
    slow = gpus.links_finding(18.2, num_gpus=4)
    assert slow.status == "warning"
    assert "18 GB/s in an all-reduce over 4 GPUs, 100 are expected" in slow.text
    assert "nvlink --status" in slow.fix
    assert gpus.links_finding(331.0, num_gpus=4).status == "ok"


def test_facts_travel_between_processes() -> None:
    facts = replace(HOST, without_peer=((0, 3),), ipc_error="no")
    assert from_json(f"a library's note\n{json.dumps(asdict(facts))}\n") == facts


@pytest.mark.skipif(gpus.has_gpus(), reason="of a machine without GPUs")
def test_without_gpus() -> None:
    facts, findings = gpus.look_at_gpus(None)
    assert facts == GpuFacts()
    assert {finding.status for finding in findings} == {"skipped"}
    _, findings = gpus.look_at_gpus("13.0")
    assert findings[0].status == "warning"
    assert "0 seen, but torch is built for CUDA 13.0" in findings[0].text


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without GPUs")
def test_the_probe_says_why_cuda_does_not_start() -> None:
    facts = from_json(output_of([sys.executable, "-m", "megadiff.doctor.gpu_probe"], timeout_s=120))
    assert not facts.devices
    assert facts.cuda_error


def test_links_are_measured(tmp_path: Path) -> None:
    """The rank's code on gloo, alone: there is nothing to send, so that the figure is 0."""
    # in a process of its own: another test's process group may be there
    arguments = (1, str(tmp_path), "gloo", 1024, 0.01)
    torch.multiprocessing.spawn(links_probe.run_rank, args=arguments, nprocs=1)
    assert float((tmp_path / links_probe.FILE).read_text()) == 0.0
