"""Processes are bound to the CPUs beside their GPUs, by a /sys folder as machines have it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadiff.process import affinity
from megadiff.process.affinity import bind, local_cpus, pci_id

CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 beside the first CPU, GPU 1 beside the second, GPU 2 unknown, GPU 3 beside others."""
    cpus = [str(CPUS[0]), str(CPUS[-1]), "0-1000", "5000-5003"]
    for gpu, (node, text) in enumerate(zip((0, 1, -1, 2), cpus, strict=True)):
        folder = tmp_path / f"0000:{gpu:02x}:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{text}\n")

    def properties(gpu: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(affinity, "PCI_DEVICES", tmp_path)
    affinity.start_cpus.cache_clear()


@pytest.fixture
def child() -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)


def test_lists_of_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(affinity, "PCI_DEVICES", tmp_path)
    folder = tmp_path / "0000:18:00.0"
    folder.mkdir()
    assert local_cpus("0000:18:00.0") == frozenset()
    (folder / "numa_node").write_text("1\n")
    (folder / "local_cpulist").write_text("0-3,8,64-65\n")
    assert local_cpus("0000:18:00.0") == {0, 1, 2, 3, 8, 64, 65}
    for node, cpus in (("-1", "0-3"), ("1", ""), ("none", "0")):
        (folder / "numa_node").write_text(node)
        (folder / "local_cpulist").write_text(cpus)
        assert local_cpus("0000:18:00.0") == frozenset()


def test_an_address_is_sysfs_own(monkeypatch):
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
    assert pci_id(0) == "0001:dc:04.0"


@needs_two
def test_a_process_and_all_its_threads_are_beside_its_gpu(machine, child, caplog):
    caplog.set_level(logging.INFO)
    bind(child.pid, [1], name="replica_1")
    assert os.sched_getaffinity(child.pid) == {CPUS[-1]}
    assert f"replica_1 is bound to 1 of {len(CPUS)} CPUs" in caplog.text
    bind(child.pid, [1], name="replica_1")
    assert len(caplog.records) == 1  # told once


@needs_two
def test_a_child_does_not_keep_its_parents_cpus(machine, child):
    """It inherited them: here it is set as a bound parent would have left it."""
    for gpus in ([0, 1], [2], [3], []):
        os.sched_setaffinity(child.pid, {CPUS[0]})
        affinity.start_cpus()
        bind(child.pid, gpus)
        expected = {CPUS[0], CPUS[-1]} if gpus == [0, 1] else set(CPUS)
        assert os.sched_getaffinity(child.pid) == expected, gpus


@needs_two
def test_a_batch_systems_binding_stays(machine, child, monkeypatch, caplog):
    """Of the GPU's CPUs those that the process was started with; all of these where none is."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(affinity, "start_cpus", lambda: frozenset({CPUS[0]}))
    os.sched_setaffinity(child.pid, {CPUS[0]})
    for gpu in (0, 1, 2):
        bind(child.pid, [gpu])
        assert os.sched_getaffinity(child.pid) == {CPUS[0]}
    assert not caplog.records


def test_a_process_that_is_gone_is_let_be(machine, child):
    child.kill()
    child.wait(10)
    bind(child.pid, [0])
