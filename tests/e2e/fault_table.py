"""The gate against one replica whose fault is changed while it runs: a row of family × fault costs
two calls of the replica, and no process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

from megadiff.config.load import load_config
from megadiff.engines import build_engine
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import init_mesh
from megadiff.train import parity, probe
from megadiff.train.build_sync import build_sync
from megadiff.train.check import check
from megadiff.train.connect import connect
from megadiff.train.run import run_folder
from tests.distributed.ranks import run_ranks


def gate_under(
    faults: Sequence[str], *, fault_file: Path, arguments: Sequence[str], folder: Path
) -> tuple[dict[str, float], dict[str, str]]:
    """Return (gaps without a fault, fault → the gate's message, "" where it let the fault pass).

    arguments: a run's config files and overrides. fault_file: broken_replica's.
    """
    out = folder / "gate.json"
    run_ranks(_gate_worker, 1, list(faults), fault_file, list(arguments), out)
    gaps, messages = json.loads(out.read_text())
    return gaps, messages


def _gate_worker(faults: list[str], fault_file: Path, arguments: list[str], out: Path) -> None:
    config = load_config(arguments)
    with ExitStack() as stack:
        layout, adapter, prompts, _ = check(config, world_size=1, stack=stack)
        mesh = init_mesh(layout, "cpu")
        engine = build_engine(config, mesh, adapter)
        fleet = connect(config, mesh, run_folder(config), [], stack).fleet
        stack.enter_context(closing(build_sync(engine, fleet))).push(0)
        replicas = SimpleNamespace(fleet=fleet, trim=lambda: None)
        calls = probe.prepare(adapter, prompts, config=config, mesh=mesh)

        fault_file.write_text("none")
        gaps = parity.check(engine, replicas, calls, step=0)
        messages = {}
        for fault in faults:
            fault_file.write_text(fault)
            try:
                parity.check(engine, replicas, calls, step=0)
                messages[fault] = ""
            except AgreedError as error:
                messages[fault] = str(error)
        fault_file.write_text("none")
    out.write_text(json.dumps([gaps, messages]))
