"""The evaluation before a run's first step, in a new folder also of one that goes on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from megadiff.config.schema import Config
from megadiff.observe.profile import StepProfile
from megadiff.observe.timers import Timers
from megadiff.observe.trackers import has_figures
from megadiff.train.build import _recording
from megadiff.train.record import Recorder
from tests.meshes import one_rank_mesh


@pytest.mark.parametrize(("step", "has_row"), [(0, False), (20, False), (20, True)])
def test_a_new_folder_begins_with_an_evaluation(tmp_path: Path, step: int, has_row: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 20}\n' if has_row else "")
    is_new = not has_figures(tmp_path)
    timers = Timers()
    config = Config()
    config.run.dir = str(tmp_path.parent)
    config.run.name = tmp_path.name
    config.track = ["jsonl"]
    config.train.num_steps = 30

    with ExitStack() as stack:
        trackers, bar = _recording(config, step, stack, is_new=is_new)
        recorder = Recorder(
            trackers=trackers,
            progress_bar=bar,
            config=config,
            mesh=one_rank_mesh(),
            evaluate=lambda step: {"eval/color": 0.5},
            timers=timers,
            profile=StepProfile(tmp_path, [], timers=timers, rank=0, device_type="cpu"),
            is_new_folder=is_new,
        )
        recorder.start(step)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/color" in row] == ([] if has_row else [step])
