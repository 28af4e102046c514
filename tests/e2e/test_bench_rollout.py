"""The rollout benchmark as it is called, on the tiny model: diffusers and a real replica, a line
for each way.
"""

import json

import bench_rollout

from megadiff.rollout.client.client import ReplicaClient


def test_a_line_for_every_way(tiny_model, registry, tmp_path, capfd, monkeypatch):
    """With a replica that runs already, as any other would take half a minute to start."""
    client = ReplicaClient(
        json.loads((registry / "replica_0.json").read_text())["url"], "replica_0"
    )
    monkeypatch.setattr(bench_rollout, "start_replica", lambda *_, **__: (None, client))
    folders = [f"--model={tiny_model}", f"--scratch={tmp_path}", f"--out={tmp_path / 'out.json'}"]
    sizes = ["--images=12", "--size=64", "--steps=6", "--repeat=1"]
    how = ["--same-noise", "--device=cpu", "--dtype=float32"]
    assert bench_rollout.main([*folders, *sizes, *how]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["way"] for row in report["rows"]] == [
        "diffusers",
        "images",
        "images, one a request",
        "rollout",
        "rollout, same noise",
    ]
    # 12 samples of 6 steps; windows begin at 0 to 3, and 1 to 4 steps are one for the group
    assert [row["forwards"] for row in report["rows"][3:]] == [72, 72 - 11 * 2.5]
    assert all(row["images_per_s"] > 0 and row["first_s"] > 0 for row in report["rows"])
    assert (
        report["command"].startswith("python tools/bench_rollout.py --model=")
        and report["versions"]["torch"]
    )
    table = capfd.readouterr().out.splitlines()[-6:]
    assert table[2].startswith("| images |") and table[2].endswith("| 1.00 |")


def test_shares():
    assert bench_rollout._shares(16, 10) == [8, 8] and bench_rollout._shares(7, 10) == [7]
    assert bench_rollout._shares(25, 10) == [9, 8, 8]
