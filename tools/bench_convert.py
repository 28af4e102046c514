"""Measure speed and memory of `megadiff convert` against cp of the same data.

    python tools/bench_convert.py --gib 4 --json convert.json

It writes a transformer of Qwen-Image's width with random float32 weights of about --gib. Then it
runs, --rounds times in turn: cp of it, diffusers → megatron tp 4, cp of that, and back. Each is a
process of its own. Before each the disk has caught up (sync), old outputs are gone and the input
has been read once, so that all start from the page cache. Neither cp nor the converter waits for
the disk (with --sync both do).

Seconds are medians. The converter's are those it reports, from its first read to its last write;
`process` is with Python's start and its imports. `× cp` is the median of the ratios to the cp just
before. Exit code 1 when what came back differs from what was sent. See docs/converting.md.
"""

from __future__ import annotations

import filecmp
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from bench_machine import cpu_name, tool_parser, versions
from random_weights import write_random_transformer

from megadiff.convert.convert import Options, convert
from megadiff.convert.model_folders import WEIGHTS_NAME, open_model
from megadiff.models.registry import component_model

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "assets" / "qwen_image"  # config files of the real model
REPORT = re.compile(r"[\d.]+ [GM]iB in ([\d.]+) s")
PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
SECONDS = ("cp_s", "convert_s", "process_s")
CONVERT = """
import sys
from megadiff.convert.command import main
code = main(sys.argv[1:])
sys.stderr.write(open("/proc/self/status").read())  # ru_maxrss would begin with the parent's
sys.exit(code)
"""


def main(argv: list[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--gib", type=float, default=4.0, help="of float32 weights; a block of Qwen-Image is 1.27"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the filesystem to measure; needs three times --gib"
    )
    parser.add_argument("--sync", action="store_true", help="time until all is on the disk")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="bench_convert_", dir=args.folder))
    try:
        figures = measure(folder, gib=args.gib, rounds=args.rounds, sync=args.sync)
    finally:
        shutil.rmtree(folder)
    sys.stdout.write(table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["same"] else 1


def measure(folder: Path, *, gib: float, rounds: int, sync: bool) -> dict:
    """Return all figures: seconds by run, sizes and peak memory in bytes."""
    source = folder / "source"
    shards = folder / "tp4"
    back = folder / "back"
    copy = folder / "copy"
    write_source(folder, source, gib=gib)
    runs: dict[str, list[dict]] = {"to_tp4": [], "to_diffusers": []}
    same = True
    for _ in range(rounds):
        for old in (shards, back):
            shutil.rmtree(old, ignore_errors=True)
        for key, src, dst, options in (
            ("to_tp4", source, shards, ("--to", "megatron", "--tp", "4")),
            ("to_diffusers", shards, back, ("--to", "diffusers")),
        ):
            cp_s = time_cp(src, copy, sync=sync)
            runs[key].append({"cp_s": cp_s, **time_convert(src, dst, options, sync=sync)})
        same &= filecmp.cmp(source / WEIGHTS_NAME, back / WEIGHTS_NAME, shallow=False)
    sizes = []
    for component in open_model(source).components.values():
        sizes += [stored.meta.num_bytes for stored in component.tensors.values()]
    machine = {"cpu": cpu_name(), "versions": versions()}
    return {
        "num_bytes": sum(sizes),
        "largest_tensor": max(sizes),
        "sync": sync,
        "same": same,
        "runs": runs,
        "machine": machine,
    }


def write_source(folder: Path, source: Path, *, gib: float) -> None:
    """Write the transformer in float32, as one file."""
    shapes = component_model(SHAPES / "transformer").shapes
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    block = sum(size for name, size in sizes.items() if name.startswith("transformer_blocks.0."))
    rest = sum(size for name, size in sizes.items() if not name.startswith("transformer_blocks."))
    layers = max(round((gib * 2**30 - rest) / block), 1)
    write_random_transformer(SHAPES, folder / "random", device="cpu", num_layers=layers)
    weights = folder / "random" / "transformer"
    files = sorted(weights.glob("*.safetensors"))
    if len(files) == 1:  # so that it comes back as one file
        files[0].rename(weights / WEIGHTS_NAME)
        (weights / f"{WEIGHTS_NAME}.index.json").unlink()
    convert(
        weights,
        source,
        Options(to="diffusers", dtype="float32"),
        progress=lambda *_: nullcontext(lambda _: None),
    )
    shutil.rmtree(folder / "random")


def time_cp(src: Path, copy: Path, *, sync: bool) -> float:
    """Return the seconds that cp takes."""
    _prepare(src)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", src, copy], check=True)
    if sync:
        subprocess.run(["sync", *(path for path in copy.rglob("*") if path.is_file())], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(copy)
    return seconds


def time_convert(src: Path, dst: Path, options: tuple[str, ...], *, sync: bool) -> dict[str, float]:
    """Return the converter's seconds, those of its process, and its peak resident bytes."""
    _prepare(src)
    command = [sys.executable, "-c", CONVERT, src, dst, *options, *(["--sync"] if sync else [])]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(
            f"convert {src} {dst} {' '.join(options)} exited with {done.returncode}: {done.stderr}"
        )
    peak = int(PEAK.search(done.stderr)[1]) * 1024
    return {
        "convert_s": float(REPORT.search(done.stderr)[1]),
        "process_s": seconds,
        "peak_rss": peak,
    }


def table(figures: dict) -> str:
    gib = figures["num_bytes"] / 2**30
    largest = figures["largest_tensor"] / 2**30
    waited = "until it is on the disk" if figures["sync"] else "into the page cache"
    lines = [
        f"{gib:.2f} GiB float32, largest tensor {largest:.3f} GiB, {waited}; "
        f"{figures['machine']['cpu']}",
        f"memory allowed: 1 GiB + 2 × largest = {1 + 2 * largest:.2f} GiB",
        "",
        "| | cp s | convert s | GiB/s | × cp | process s | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, title in (("to_tp4", "diffusers → megatron tp 4"), ("to_diffusers", "and back")):
        runs = figures["runs"][key]
        cp, seconds, process = (statistics.median(run[name] for run in runs) for name in SECONDS)
        ratio = statistics.median(run["cp_s"] / run["convert_s"] for run in runs)
        peak = max(run["peak_rss"] for run in runs) / 2**30
        lines.append(
            f"| {title} | {cp:.2f} | {seconds:.2f} | {gib / seconds:.2f} | {ratio:.2f} | "
            f"{process:.1f} | {peak:.2f} |"
        )
    same = "the same file" if figures["same"] else "ANOTHER FILE"
    return "\n".join([*lines, "", f"what came back is {same}"]) + "\n"


def _prepare(src: Path) -> None:
    os.sync()
    subprocess.run(
        ["cat", *(path for path in src.rglob("*") if path.is_file())],
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
