"""The converter's benchmark as it is called, on a small transformer."""

import json
import shutil

import bench_convert
import pytest


@pytest.mark.slow
def test_both_directions_are_timed_and_compared(tiny_model, tmp_path, capsys, monkeypatch):
    shapes = shutil.copytree(tiny_model, tmp_path / "shapes")
    monkeypatch.setattr(bench_convert, "SHAPES", shapes)
    (tmp_path / "scratch").mkdir()
    options = [
        "--gib",
        "0.01",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path / "scratch"),
        "--json",
        str(tmp_path / "f.json"),
    ]
    assert bench_convert.main(options) == 0
    text, figures = capsys.readouterr().out, json.loads((tmp_path / "f.json").read_text())
    assert "diffusers → megatron tp 4" in text and "what came back is the same file" in text
    assert figures["same"] and 9e6 < figures["num_bytes"] < 13e6
    for run in (figures["runs"]["to_tp4"][0], figures["runs"]["to_diffusers"][0]):
        assert (
            0 < run["convert_s"] < run["process_s"]
            and run["cp_s"] > 0
            and 1e8 < run["peak_rss"] < 1.1e9
        )
    assert not list((tmp_path / "scratch").iterdir())
