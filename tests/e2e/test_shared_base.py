"""A LoRA run whose replica maps the trainer's base: the same run, in one memory.

The replica dies in it and maps the base again, and a bit of the base that changes is found.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch

from megadiff.sync.transports.shared_memory import FOLDER, PREFIX

KEYS = (
    "lora.rank=4",
    "lora.alpha=8",
    "optim.lr=1e-3",
    "algorithm.kl_coef=0.04",
    "rollout.sleep=always",
    "sync.transport=shm",
)
SAME = ("loss/", "reward/", "policy/", "optim/", "parity/")
SPOILED = "transformer_blocks.1.attn.to_k.weight"


def spoil_run() -> None:
    """After update 1 the replica is killed; after update 3 a bit of the base is another.

    What maps the base is written down after each update.
    """
    import megadiff.train.loop as loop

    update = loop.update
    seen: list[dict] = []

    def spoiling(engine, *args, progress, **kwargs):
        figures = update(engine, *args, progress=progress, **kwargs)
        base = engine.shared_base
        seen.append({"trainer": os.getpid(), "num_bytes": base._flat.numel(), "maps": _maps()})
        Path("seen.json").write_text(json.dumps(seen))
        if progress.step == 0:
            (entry,) = Path().glob("*/replicas/node_0/replica_0.json")
            os.kill(json.loads(entry.read_text())["pid"], signal.SIGKILL)
        if progress.step == 2:
            base.tensors[SPOILED].view(torch.int32)[3, 2] ^= 1
        return figures

    loop.update = spoiling


def _maps() -> dict[int, list[dict]]:
    """Return process → its mappings of bases: file, rights, KiB that are there and KiB written."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (rows := list(_mappings(folder / "smaps"))):
            found[int(folder.name)] = rows
    return found


def _mappings(smaps: Path) -> Iterator[dict]:
    try:
        text = smaps.read_text()
    except OSError:  # it is gone, or another user's
        return
    row: dict = {}
    for line in text.splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):  # a mapping's first line: range, rights, …, file
            row = {"rights": fields[1], "file": fields[5] if len(fields) > 5 else ""}
        elif fields[0] in ("Rss:", "Private_Dirty:", "Anonymous:"):
            row[fields[0][:-1]] = int(fields[1])
        # Anonymous comes last of the three
        if fields[0] == "Anonymous:" and PREFIX in row["file"]:
            yield row


def test_the_replica_maps_the_trainers_base(trainer):
    apart = trainer.run(*KEYS, "lora.shared_base=never", name="apart")
    assert apart.code == 0, apart.stderr
    shared = trainer.run(*KEYS, name="shared", prepare=spoil_run)

    # the same run, although the replica died after the first step
    assert len(shared.rows) == len(apart.rows) == 3, shared.stderr
    for row, expected in zip(shared.rows, apart.rows, strict=True):
        keys = [key for key in expected if key.startswith(SAME)]
        assert len(keys) > 10
        assert {key: row[key] for key in keys} == {key: expected[key] for key in keys}
    events = (shared.folder / "events.jsonl").read_text()
    assert "replica_died" in events, events

    # the last push found the bit in the weights that the replica uses
    assert shared.code == 1
    assert "holds 1 of" in shared.stderr and "with other bits" in shared.stderr, shared.stderr
    assert f"transformer.{SPOILED} (sent" in shared.stderr

    _check_maps(json.loads((trainer.folder / "seen.json").read_text()))

    # the base never travelled; where it is apart, waking takes all of it each time
    assert all(row["sync/gib"] < apart.rows[0]["sync/gib"] / 10 for row in shared.rows)


def _check_maps(seen: list[dict]) -> None:
    """The trainer and one worker map the file, the worker without a page of its own."""
    workers = []
    for at_update in seen:
        trainer_pid, num_bytes = at_update["trainer"], at_update["num_bytes"]
        maps = {int(pid): rows for pid, rows in at_update["maps"].items()}
        (own,) = maps[trainer_pid]
        assert own["rights"] == "rw-s"
        theirs = {pid: rows for pid, rows in maps.items() if rows[0]["file"] == own["file"]}
        del theirs[trainer_pid]
        ((worker, (mapping,)),) = theirs.items()
        workers.append(worker)
        assert mapping["rights"] == "rw-p"
        assert mapping["Rss"] * 1024 >= num_bytes > 100_000
        assert mapping["Anonymous"] == 0, "a page was written to, and copied"
        assert not Path(FOLDER, own["file"]).exists()  # the run is over
    # another process after the kill
    assert workers[0] != workers[1] == workers[2]
