"""The sync benchmark as it is called, on the tiny model: a real replica, a line for each transport,
a table.
"""

import json

import bench_replica
import bench_sync
import pytest


@pytest.mark.slow
def test_a_line_for_every_transport_and_for_lora(tiny_model, tmp_path, capfd, monkeypatch):
    """The replica has a token, as on a host where MEGADIFF_TOKEN is set."""
    monkeypatch.setenv("MEGADIFF_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setattr(bench_replica, "START_TIMEOUT_S", 180.0)  # a wait that fails says why
    folders = [f"--model={tiny_model}", f"--scratch={tmp_path}"]
    options = ["--device=cpu", "--dtype=float32", "--bucket-mib=1", "--repeat=1", "--lora-rank=4"]
    assert bench_sync.main([*folders, *options, "--transport", "shm", "pipe"]) == 1
    printed = capfd.readouterr().out
    machine, *rows = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert machine["cpu"] and machine["versions"]["torch"]
    assert [(row["transport"], row["what"]) for row in rows] == [
        ("shm", "all weights"),
        ("pipe", "all weights"),
        ("shm", "lora"),
        ("pipe", "lora"),
    ]
    whole, refused, lora, _ = rows
    for row in (whole, lora):
        assert row["seconds"] > 0 and row["gib_per_s"] > 0 and 0 < row["commit_share"] < 1
    assert lora["gib"] < whole["gib"] / 10
    assert "transport 'pipe' is none of" in refused["failed"]
    assert "| shm | shm | all weights |" in printed
