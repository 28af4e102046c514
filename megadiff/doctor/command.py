"""Look for what would stop a run or slow it down: the machine, a model, a config.

    megadiff doctor [CONFIG.yaml … key=value …] [--model DIR] [--json]

Each finding has its fix. Nothing is changed; a file is written into each folder of a run and
removed. Every probe has a deadline. Exit codes: 0 no error, 1 an error, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from megadiff.config.load import ConfigError, load_config
from megadiff.config.schema import Config, EngineConfig, ParallelConfig, SyncConfig
from megadiff.doctor import folders, gpus, machine, nodes, versions
from megadiff.doctor.finding import Finding, error, ok, refusal, to_lines
from megadiff.doctor.gpu_facts import GpuFacts
from megadiff.doctor.probes import within
from megadiff.observe.step_folders import step_folders
from megadiff.process.descriptors import rank_sockets
from megadiff.process.words import counted, error_text

QUICK_S = 15.0  # a folder of a file server, which may be far
NODES_S = 30.0  # srun has a deadline of its own
MODEL_S = 300.0  # headers of hundreds of files, and rewards that are loaded
RUN_DIR = Path("runs")  # the default of run.dir


def main(argv: Sequence[str] | None = None) -> int:
    """Write the findings to stdout as they come, and return the exit code."""
    options, overrides = _parser().parse_known_args(argv)
    unknown = [argument for argument in overrides if argument.startswith("-")]
    if unknown or options.world_size < 0:
        sys.stderr.write(f"error: no such option: {' '.join(unknown) or '--world-size below 0'}\n")
        return 2

    findings: list[Finding] = []
    for finding in _look(options, [*options.config, *overrides]):
        findings.append(finding)
        if not options.json:
            sys.stdout.write("\n".join(to_lines(finding)) + "\n")
            sys.stdout.flush()
    num_errors = sum(finding.status == "error" for finding in findings)
    num_warnings = sum(finding.status == "warning" for finding in findings)
    if options.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    else:
        sys.stdout.write(f"\n{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}\n")

    return 1 if num_errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="*", help="yaml files and key=value, as for train")
    parser.add_argument("--model", type=Path, help="a model folder; by default the config's")
    parser.add_argument(
        "--world-size", type=int, default=0, help="processes that train; by default this host's"
    )
    parser.add_argument("--json", action="store_true", help="a list of findings")

    return parser


def _look(options: argparse.Namespace, arguments: list[str]) -> Iterator[Finding]:
    """Yield all findings, what costs nothing first."""
    config = None
    if arguments:
        try:
            config = load_config(arguments)
            yield ok("config", f"{' '.join(arguments)}: every key is known")
        except ConfigError as failure:
            yield refusal("config", str(failure))

    facts = versions.installed()
    yield from versions.version_findings(facts)
    yield from _machine_findings(config, options.world_size)
    yield from _guarded("clocks of nodes", NODES_S, lambda: nodes.node_findings(os.environ))
    gpu_facts, gpu_findings = gpus.look_at_gpus(facts.torch_cuda)
    yield from gpu_findings
    if config or options.model:
        yield from _model_findings(options, config, gpu_facts)
    else:
        yield from _disk_findings(config, needed_bytes=0)


def _machine_findings(config: Config | None, world_size: int) -> Iterator[Finding]:
    """Yield what the machine grants. world_size: 0 where the user names none."""
    sync = config.sync if config else SyncConfig()
    yield from _guarded(
        "/dev/shm",
        QUICK_S,
        lambda: [
            machine.shared_memory_finding(
                machine.shared_memory_free(),
                bucket_mib=sync.bucket_mib,
                is_decided=config is not None,
            )
        ],
    )
    yield from machine.limit_findings(
        machine.read_limits(), num_sockets=_num_sockets(config, world_size)
    )
    compiles = config is not None and (config.engine.compile or config.rollout.compile)
    yield machine.compiler_finding(*machine.find_compiler(), is_needed=compiles)
    yield from _guarded("ports", QUICK_S, lambda: machine.port_findings(os.environ))
    for key, folder in _run_folders(config):
        yield from _guarded(key, QUICK_S, _folder_look(key, folder))


def _num_sockets(config: Config | None, world_size: int) -> int:
    """Count what a rank has to the others; 0 where nobody said how many they are."""
    if not world_size:
        return 0
    engine = config.engine if config else EngineConfig()
    parallel = config.parallel if config else ParallelConfig()
    return rank_sockets(
        world_size=world_size,
        # a config's mistakes are told by its own finding
        sp=max(1, parallel.sp),
        tp=max(1, parallel.tp),
        dp_replicate=max(1, parallel.dp_replicate),
        backend=engine.backend,
    )


def _folder_look(key: str, folder: Path) -> Callable[[], Iterable[Finding]]:
    return lambda: folders.folder_findings(folders.probe_folder(key, folder))


def _run_folders(config: Config | None) -> Iterator[tuple[str, Path]]:
    """Yield (key, folder) of what a run writes to."""
    yield "run.dir", Path(config.run.dir) if config else RUN_DIR
    if config and config.rollout.registry:
        yield "rollout.registry", Path(config.rollout.registry)
    if config and config.sync.folder:
        yield "sync.folder", Path(config.sync.folder)


def _model_findings(
    options: argparse.Namespace, config: Config | None, gpu_facts: GpuFacts
) -> Iterator[Finding]:
    try:
        # Here, as they import torch, which takes seconds.
        from megadiff.doctor import model, run_config
    except (ImportError, OSError) as failure:
        yield error("imports", f"a package does not import: {failure}", fix=versions.SET_UP_AGAIN)
        return

    folder = options.model or Path(config.model.path if config else "")
    family = config.model.family if config else ""
    yield from _guarded("model", MODEL_S, lambda: model.model_findings(folder, family))

    world_size = options.world_size or max(1, len(gpu_facts.devices))
    if config:
        config.model.path = str(folder)
        chosen = config
        yield from _guarded(
            "first refusal",
            MODEL_S,
            lambda: [run_config.refusal_finding(chosen, world_size=world_size)],
        )
        yield from _guarded(
            "plan",
            MODEL_S,
            lambda: [
                run_config.plan_finding(
                    chosen, gpu_facts, world_size=world_size, asked=options.world_size
                )
            ],
        )

    def needed_bytes() -> int:
        if config:
            return run_config.checkpoint_bytes(config)
        return run_config.folder_checkpoint_bytes(folder)

    needed = 0
    # what is wrong with the model is told by now
    with suppress(OSError, ValueError):
        needed = within(MODEL_S, needed_bytes)
    yield from _disk_findings(config, needed_bytes=needed)


def _disk_findings(config: Config | None, *, needed_bytes: int) -> Iterator[Finding]:
    key, folder = next(_run_folders(config))

    def look() -> list[Finding]:
        count = 1
        what = "a checkpoint of all weights"
        if config:
            num_there = _num_checkpoints(config)
            # A new checkpoint is whole before the oldest one goes.
            count = config.checkpoint.keep + 1 - num_there
            what = counted(count, "checkpoint")
            what += f", beside {num_there} that the run has" if num_there else ""
        probe = folders.probe_folder(key, folder)
        return [folders.disk_finding(probe, needed_bytes=count * needed_bytes, what=what)]

    yield from _guarded("disk", QUICK_S, look)


def _num_checkpoints(config: Config) -> int:
    """Return how many checkpoints of the run will make room for new ones."""
    # Otherwise the run begins another history, and those of this one stay.
    if config.checkpoint.resume != "auto":
        return 0
    folders = step_folders(Path(config.run.dir) / config.run.name / "checkpoints")
    return min(len(folders), config.checkpoint.keep)


def _guarded(name: str, seconds: float, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what a look finds; one that fails or takes too long is a finding itself."""
    try:
        yield from within(seconds, lambda: list(look()))
    except Exception as failure:  # of a user's own reward, for one
        yield refusal(name, error_text(failure))
