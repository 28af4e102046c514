"""The control plane's benchmark as it is called, with few replicas."""

import json

import bench_control_plane
import pytest


@pytest.mark.slow
def test_all_parts_are_timed(tmp_path, capsys):
    out = tmp_path / "figures.json"
    options = ["--replicas", "2", "17", "--tensors", "5", "--json", str(out)]
    assert bench_control_plane.main(options) == 0
    assert "of a step" in capsys.readouterr().out
    few, more = json.loads(out.read_text())["rows"]
    assert (few["replicas"], more["replicas"]) == (2, 17)
    for row in (few, more):
        assert all(0 < row[name] < 30 for name in bench_control_plane.COLUMNS)
        parts = row["route"] + row["push"]
        assert abs(row["of_step"] - parts / bench_control_plane.STEP_S) < 1e-9
