"""Compare the clocks of a Slurm job's nodes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megadiff.doctor.finding import Finding, error, ok, skipped
from megadiff.doctor.folders import SKEW_S, outside, skew_finding
from megadiff.doctor.probes import ProbeError, output_of
from megadiff.process.words import counted

TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class NodeClocks:
    """Hold each node's time, and this host's before and after all were asked, in seconds."""

    seconds: Mapping[str, float]
    before: float
    after: float


def read_node_clocks(num_nodes: str) -> NodeClocks:
    """Ask every node of this job for its time. Raises ProbeError."""
    before = time.time()
    text = output_of(
        [
            "srun",
            "--overlap",
            f"--nodes={num_nodes}",
            f"--ntasks={num_nodes}",
            "--ntasks-per-node=1",
            "sh",
            "-c",
            'echo "$(hostname) $(date +%s.%N)"',
        ],
        timeout_s=TIMEOUT_S,
    )
    after = time.time()
    lines = [line.split() for line in text.splitlines() if line.strip()]

    try:
        seconds = {name: float(clock) for name, clock in lines}
    except ValueError as failure:
        raise ProbeError(f"srun answered {text[:80]!r}, not a name and a time a line") from failure

    return NodeClocks(seconds=seconds, before=before, after=after)


def node_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for the clocks of this job's nodes, or why they are not looked at."""
    if "SLURM_JOB_ID" not in environment or not shutil.which("srun"):
        yield skipped("clocks of nodes", "not within a Slurm job")
        return
    num_nodes = environment.get("SLURM_JOB_NUM_NODES", "1")

    try:
        clocks = read_node_clocks(num_nodes)
    except ProbeError as failure:
        yield error("clocks of nodes", str(failure), fix="see `sinfo -R` for nodes that are down")
        return
    yield from clock_findings(clocks)


def clock_findings(clocks: NodeClocks) -> Iterator[Finding]:
    """Yield a finding for each node whose clock is apart from this host's, or one for all.

    A node answers at an unknown moment, so its skew is how far it lies outside of the interval.
    """
    names = sorted(clocks.seconds)
    apart = 0

    for name in names:
        skew_s = outside(clocks.seconds[name], before=clocks.before, after=clocks.after)
        if abs(skew_s) > SKEW_S:
            apart += 1
            yield skew_finding("clocks of nodes", skew_s, who=name)
    if not apart:
        text = f"the clocks of {counted(len(names), 'node')} are within {SKEW_S:.1f} s of this one"
        yield ok("clocks of nodes", text)
