"""Compare the clocks of a Slurm job's nodes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping

from megadiff.doctor.finding import Finding, error, ok, skipped
from megadiff.doctor.folders import SKEW_S, outside, skew_finding
from megadiff.doctor.probes import ProbeError, output_of
from megadiff.process.words import counted

TIMEOUT_S = 15.0


def read_node_skews(num_nodes: str) -> dict[str, float]:
    """Return how many seconds each node of this job is ahead of this host. Raises ProbeError.

    A node answers at an unknown moment, so its skew is how far its time lies outside of the
    interval in which all were asked.
    """
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
        return {name: outside(float(clock), before=before, after=after) for name, clock in lines}
    except ValueError as failure:
        raise ProbeError(f"srun answered {text[:80]!r}, not a name and a time a line") from failure


def node_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each node whose clock is apart from this host's, or one for all."""
    name = "clocks of nodes"
    if "SLURM_JOB_ID" not in environment or not shutil.which("srun"):
        yield skipped(name, "not within a Slurm job")
        return

    try:
        skews = read_node_skews(environment.get("SLURM_JOB_NUM_NODES", "1"))
    except ProbeError as failure:
        yield error(name, str(failure), fix="see `sinfo -R` for nodes that are down")
        return

    apart = {node: skew_s for node, skew_s in skews.items() if abs(skew_s) > SKEW_S}
    for node in sorted(apart):
        yield skew_finding(name, apart[node], who=node)
    if not apart:
        text = f"the clocks of {counted(len(skews), 'node')} are within {SKEW_S:.1f} s of this one"
        yield ok(name, text)
