"""`megadiff doctor` names what is wrong with a machine, and how to mend it.

What can be broken for real is broken: a port, a folder, a process that hangs. The rest are facts
as such machines report them.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megadiff.cli.main import main
from megadiff.doctor import folders, machine, nodes, versions
from megadiff.doctor.finding import Finding, to_lines
from megadiff.doctor.machine import GIB, MIB, UNLIMITED
from megadiff.doctor.probes import ProbeError, output_of, within

NOBODY = 65534
ROOT = Path(__file__).parents[3]


def status_of(findings: Iterator[Finding]) -> dict[str, Finding]:
    """Return name → finding; an error has a fix, and an ok finding needs none."""
    by_name = {finding.name: finding for finding in findings}
    for finding in by_name.values():
        assert bool(finding.fix) == (finding.status in ("error", "warning")), finding
    return by_name


def test_small_shared_memory() -> None:
    """A container's 64 MiB are too small for any run, and half a GiB for this config's buckets."""
    container = machine.shared_memory_finding(64 * MIB, bucket_mib=1024, is_decided=False)
    assert container.status == "error"
    assert "64.00 MiB free, 2.25 GiB are needed" in container.text
    assert "--shm-size=3g" in container.fix

    small = machine.shared_memory_finding(GIB // 2, bucket_mib=1024, is_decided=False)
    assert small.status == "warning"
    decided = machine.shared_memory_finding(GIB // 2, bucket_mib=1024, is_decided=True)
    assert decided.status == "error"
    assert machine.shared_memory_finding(GIB, bucket_mib=64, is_decided=True).status == "ok"


def test_nothing_to_compile_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "Python.h"
    missing = machine.compiler_finding("/usr/bin/gcc", header, is_needed=True)
    assert missing.status == "error" and f"{header} is not there" in missing.text
    header.touch()
    assert machine.compiler_finding("/usr/bin/gcc", header, is_needed=True).status == "ok"

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    compiler, _ = machine.find_compiler()
    none = machine.compiler_finding(compiler, header, is_needed=False)
    assert none.status == "warning" and "no C compiler" in none.text and "gcc" in none.fix
    own = tmp_path / "mycc"
    own.touch(mode=0o755)
    monkeypatch.setenv("CC", str(own))
    assert machine.find_compiler()[0] == str(own)


def test_limits() -> None:
    limits = machine.ProcessLimits(
        open_files=1024, locked=64 * 1024, stack=MIB, has_infiniband=True
    )
    low = status_of(machine.limit_findings(limits))
    assert "1024 files may be open, 4096 are needed" in low["ulimit -Hn"].text
    assert "64.00 KiB may be locked, InfiniBand needs unlimited" in low["ulimit -l"].text
    assert "ulimit -s 8192" in low["ulimit -s"].fix
    many = status_of(machine.limit_findings(replace(limits, open_files=4096), num_sockets=4493))
    assert "4096 files may be open, 5517 are needed" in many["ulimit -Hn"].text
    free = machine.ProcessLimits(
        open_files=UNLIMITED, locked=UNLIMITED, stack=UNLIMITED, has_infiniband=True
    )
    assert {finding.status for finding in machine.limit_findings(free)} == {"ok"}
    without_network = status_of(machine.limit_findings(replace(limits, has_infiniband=False)))
    assert without_network["ulimit -l"].status == "ok"


def test_occupied_port() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        environment = {"MASTER_PORT": str(port)}
        finding = status_of(machine.port_findings(environment))[f"port {port}"]
    assert finding.status == "error"
    assert "rendezvous" in finding.text
    assert "another MASTER_PORT" in finding.fix

    assert status_of(machine.port_findings(environment))[f"port {port}"].status == "ok"
    with pytest.raises(ValueError, match="MASTER_PORT=70000 is no port from 1 to 65535"):
        list(machine.port_findings({"MASTER_PORT": "70000"}))


@pytest.fixture
def readonly_folder() -> Iterator[Path]:
    """Yield a folder that this process may not write to, also where it began as root."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(name, 0o755)


def test_readonly_folder(readonly_folder: Path) -> None:
    facts = folders.probe_folder("run.dir", readonly_folder / "runs")
    (finding,) = folders.folder_findings(facts)
    assert finding.status == "error"
    assert f"writing to {readonly_folder} fails: Permission denied" in finding.text
    assert f"chmod u+w {readonly_folder}" in finding.fix


def test_folder_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    facts = folders.probe_folder("run.dir", file / "runs")
    assert facts.refusal == errno.ENOTDIR
    (finding,) = folders.folder_findings(facts)
    assert f"{file} is a file" in finding.fix


def test_readonly_filesystem(tmp_path: Path) -> None:
    facts = replace(folders.probe_folder("run.dir", tmp_path), refusal=errno.EROFS)
    (finding,) = folders.folder_findings(facts)
    assert "Read-only file system" in finding.text
    assert "remount,rw" in finding.fix


def test_writable_folder_is_left_as_it_was(tmp_path: Path) -> None:
    found = folders.folder_findings(folders.probe_folder("run.dir", tmp_path / "runs"))
    assert {finding.status for finding in found} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_skewed_clock_of_a_folder(tmp_path: Path) -> None:
    facts = replace(folders.probe_folder("run.dir", tmp_path), skew_s=-7.5)
    finding = status_of(folders.folder_findings(facts))["clock of run.dir"]
    assert finding.status == "error"
    assert "7.5 s behind, 2.0 s are allowed" in finding.text
    assert "chronyc" in finding.fix


SRUN = """#!{python}
import sys, time
assert sys.argv[1:3] == ["--overlap", "--nodes=2"], sys.argv
print("node-1", time.time())
print("node-2", time.time() + {skew})
"""


@pytest.fixture
def with_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what puts a program named srun in the way, with this text."""

    def put(text: str) -> None:
        program = tmp_path / "srun"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def test_skewed_clock_of_a_node(with_srun: Callable[[str], None]) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    with_srun(SRUN.format(python=sys.executable, skew=60))
    (finding,) = nodes.node_findings(job)
    assert finding.status == "error"
    assert "node-2 is " in finding.text and "s ahead, 2.0 s are allowed" in finding.text
    with_srun(SRUN.format(python=sys.executable, skew=0))
    (finding,) = nodes.node_findings(job)
    assert (finding.status, finding.text) == (
        "ok",
        "the clocks of 2 nodes are within 2.0 s of this one",
    )
    with_srun("#!/bin/sh\necho no such partition >&2; exit 3\n")
    (finding,) = nodes.node_findings(job)
    assert "ended with 3: no such partition" in finding.text
    (finding,) = nodes.node_findings({})
    assert finding.status == "skipped"


def test_full_disk(tmp_path: Path) -> None:
    facts = replace(folders.probe_folder("run.dir", tmp_path), free_bytes=5 * GIB)
    finding = folders.disk_finding(facts, needed_bytes=685 * GIB, what="3 checkpoints")
    assert finding.status == "error"
    assert "5.00 GiB free, 685.00 GiB are needed for 3 checkpoints" in finding.text
    assert "checkpoint.keep" in finding.fix
    close = folders.disk_finding(facts, needed_bytes=4 * GIB, what="a checkpoint")
    assert close.status == "warning"
    assert folders.disk_finding(facts, needed_bytes=GIB, what="a checkpoint").status == "ok"
    assert folders.disk_finding(facts, needed_bytes=0, what="").status == "ok"
    no_inodes = replace(facts, free_files=0)
    assert "0 inodes" in folders.disk_finding(no_inodes, needed_bytes=GIB, what="").text


def test_other_versions() -> None:
    facts = versions.installed()
    found = status_of(versions.version_findings(facts))
    assert {finding.status for finding in found.values()} <= {"ok", "warning"}

    packages = {**facts.packages, "vllm-omni": "0.30.1", "veomni": "0.2.0", "numpy": "1.0"}
    other = replace(facts, python="3.13.1", packages=packages)
    found = status_of(versions.version_findings(other))
    assert found["python"].status == "error"
    assert "0.2.0; tested is 0.1.12; engine.backend=veomni is refused" in found["veomni"].text
    assert found["vllm-omni"].status == "error"
    assert "numpy 1.0 (" in found["packages"].text
    pinless = replace(facts, pins={})
    assert {f.name for f in versions.version_findings(pinless) if f.status == "skipped"} == {
        "packages"
    }


def test_torchs_cuda_is_read_without_torch() -> None:
    import torch

    assert versions.read_torch_cuda() == torch.version.cuda


def test_nothing_hangs() -> None:
    """Neither a process nor a call that never answers, such as a stat on a dead file server."""
    began = time.monotonic()
    with pytest.raises(ProbeError, match="gave no answer within 0.2 s"):
        output_of(["sleep", "60"], timeout_s=0.2)
    with pytest.raises(ProbeError, match="no answer within 0.1 s"):
        within(0.1, lambda: time.sleep(1.0))
    assert time.monotonic() - began < 10
    with pytest.raises(ProbeError, match="no-such-program did not start"):
        output_of(["no-such-program"], timeout_s=1.0)
    with pytest.raises(KeyError):
        within(1.0, lambda: {}["x"])


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(any(row["status"] == "error" for row in found))
    assert all(row.keys() == {"name", "status", "text", "fix"} for row in found)
    assert list(tmp_path.iterdir()) == []

    assert main(["doctor", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err

    assert main(["doctor", "train.num_step=3"]) == 1
    text = capsys.readouterr().out
    assert "error    config            argument 'train.num_step=3': unknown key" in text
    assert "fix: did you mean train.num_steps?" in text
    assert "1 error, " in text


def test_broken_installation() -> None:
    """Without torch the doctor still speaks, as it is then that one asks it."""
    code = (
        "import sys; sys.modules['torch'] = None; from megadiff.cli.main import main; "
        "sys.exit(main(['doctor', '--json', '--model', 'assets/shapes']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    (finding,) = [row for row in json.loads(done.stdout) if row["name"] == "imports"]
    assert "a package does not import: import of torch halted" in finding["text"]
    assert finding["fix"] == "rm -f .venv/setup-stamp; launch/setup.sh"


def test_lines_are_aligned() -> None:
    finding = Finding(name="disk", status="error", text="word " * 30, fix="free some")
    lines = list(to_lines(finding))
    assert lines[0].startswith("error    disk              word word")
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1] == f"{' ' * 27}fix: free some"
