"""Pictures, videos, tables and pages in TensorBoard's and W&B's own files, read back from there."""

import io
import json
import math
import os
import struct
from pathlib import Path

import psutil
import pytest
from PIL import Image
from synthetic_run import PROMPTS, evaluation_of, metrics_of, samples_of

from megadiff.observe import video
from megadiff.observe.evaluation import evaluation_folder, write_evaluation
from megadiff.observe.samples import picture_grid, read_pixels, read_step_samples
from megadiff.observe.step_folders import step_folder
from megadiff.observe.tensorboard_tracker import markdown_table
from megadiff.observe.trackers import Trackers, build_trackers


def record(trackers: Trackers, folder: Path, *, num_frames: int) -> None:
    """A step with samples and an evaluation, as a run records it: the evaluation's files first."""
    evaluation, images = evaluation_of(1, num_steps=3, size=16)
    write_evaluation(evaluation_folder(folder, 1), evaluation, images)
    trackers.log(1, metrics_of(1, num_steps=3) | {"eval/color": 0.5, "loss/policy": math.nan})
    trackers.images(1, samples_of(1, num_steps=3, size=16, num_frames=num_frames))


def saved_samples(folder: Path):
    return read_step_samples(step_folder(folder / "samples", 1), 1)


def events_of(folder: Path):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return module.EventAccumulator(str(folder / "tensorboard")).Reload()


def text_of(events, tag: str) -> str:
    return events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


def test_tensorboard_has_evaluation_pictures_and_a_table_of_samples(tmp_path):
    with build_trackers(["tensorboard"], tmp_path, {}) as trackers:
        record(trackers, tmp_path, num_frames=1)
    events = events_of(tmp_path)

    (image,) = events.Images("evaluation")
    folder = evaluation_folder(tmp_path, 1) / "images"
    files = [name for name in evaluation_of(1, num_steps=3, size=16)[1]]
    whole = picture_grid([read_pixels(folder.parent / name) for name in files])
    assert (image.step, image.width, image.height) == (1, whole.shape[2], whole.shape[1])
    written = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")
    assert written.tobytes() == whole.permute(1, 2, 0).contiguous().numpy().tobytes()

    (grid,) = events.Images("samples")
    assert (grid.width, grid.height) == (8 * 16 + 7 * 2, 16)
    rows = text_of(events, "samples/table").splitlines()
    assert rows[0] == "|  | prompt | reward | color | jpeg_size |"
    assert len(rows) == 2 + len(samples_of(1, num_steps=3)) and rows[2].startswith(
        f"| 1 | {PROMPTS[0]} | 0.467 | "
    )
    # an evaluation has no total, and the fifth sample no colour
    assert "| reward |" not in text_of(events, "evaluation/table")
    assert any("n/a" in row for row in rows)


def test_tensorboard_videos_move_at_their_own_rate(tmp_path):
    with build_trackers(["tensorboard"], tmp_path, {}) as trackers:
        record(trackers, tmp_path, num_frames=9)
    (moving,) = events_of(tmp_path).Images("samples/video")
    gif = Image.open(io.BytesIO(moving.encoded_image_string))
    durations = []
    frames = set()
    for index in range(gif.n_frames):
        gif.seek(index)
        durations.append(gif.info["duration"])
        frames.add(gif.convert("RGB").tobytes())
    assert gif.n_frames == 9 == len(frames)
    assert sum(durations) == pytest.approx(9 * 1000 / video.FRAMES_PER_S, abs=10)


def test_a_prompt_cannot_break_the_table(tmp_path):
    with build_trackers([], tmp_path, {}) as trackers:
        record(trackers, tmp_path, num_frames=1)
    (sample, *_) = saved_samples(tmp_path)
    object.__setattr__(sample, "caption", "a | b\nc")
    assert markdown_table([sample]).splitlines()[2].startswith("| 1 | a \\| b c | 0.467 |")


def test_an_evaluation_without_its_record_has_no_pictures(tmp_path):
    with build_trackers(["tensorboard"], tmp_path, {}) as trackers:
        trackers.log(1, {"eval/color": 0.5})
    assert events_of(tmp_path).Tags()["images"] == []


def records_of(path: Path) -> list:
    """The records of a .wandb file: LevelDB's log format in blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    records = []
    fragment = b""
    position = 7
    while position < len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        fragment += data[position : position + size]
        position += size
        if kind in (1, 4):  # whole, or the last fragment
            records.append(Record.FromString(fragment))
            fragment = b""
    return records


def history_of(records) -> list[dict]:
    rows = []
    for row in (record.history for record in records if record.HasField("history")):
        values = {}
        for item in row.item:
            # of a picture's value the last key says which: _type, filenames, captions …
            values["/".join(item.nested_key)] = json.loads(item.value_json)
        rows.append(values)
    return rows


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


@pytest.fixture
def offline(tmp_path_factory, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'megadiff[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)


def test_wandb_holds_all_offline_and_a_resumed_run_is_the_same_one(tmp_path, offline):
    before = psutil.Process().children(recursive=True)
    page = tmp_path / "report.html"
    page.write_text("<h1>The reward rose.</h1>")

    config = {"algorithm": {"name": "nft"}}
    with build_trackers(["wandb"], tmp_path, config) as trackers:
        record(trackers, tmp_path, num_frames=9)
    with build_trackers(["wandb"], tmp_path, config, resume_step=1) as trackers:
        trackers.log(2, {"reward/mean": 0.75})
        trackers.page(page)

    # no service is left behind, and no setting
    assert psutil.Process().children(recursive=True) == before
    assert "WANDB_DATA_DIR" not in os.environ

    run_id = (tmp_path / "wandb_id").read_text()
    first, second = map(records_of, wandb_files(tmp_path))
    for records in (first, second):
        (run,) = [record.run for record in records if record.HasField("run")]
        assert run.run_id == run_id and run.resume and run.display_name == tmp_path.name
    assert [row["step"] for row in history_of(first)] == [1, 1, 1]
    assert history_of(first)[0]["reward/mean"] == metrics_of(1, num_steps=3)["reward/mean"]
    assert [(row["step"], row["reward/mean"]) for row in history_of(second)] == [(2, 0.75)]

    check_media(tmp_path, history_of(first))
    check_table(tmp_path, first)
    check_page(page, second)


def check_media(folder: Path, history: list[dict]) -> None:
    """Videos and evaluation pictures are the run's own files, byte for byte."""
    files = wandb_files(folder)[0].parent / "files"
    (samples,) = [row for row in history if "samples/filenames" in row or "samples/videos" in row]
    names = [v["path"] for v in samples["samples/videos"]]
    saved = saved_samples(folder)
    assert [(files / name).read_bytes() for name in names] == [s.path.read_bytes() for s in saved]
    assert video.video_rate(files / names[0]) == video.FRAMES_PER_S

    (evaluation,) = [row for row in history if "evaluation/filenames" in row]
    images = evaluation_folder(folder, 1)
    expected = [name for name in evaluation_of(1, num_steps=3, size=16)[1]]
    for name, own in zip(evaluation["evaluation/filenames"], expected, strict=True):
        assert Image.open(files / name).tobytes() == Image.open(images / own).tobytes()
    assert evaluation["evaluation/captions"][0] == PROMPTS[0]


def artifacts_of(records) -> dict[str, list]:
    """Artifact's type → its files."""
    found: dict[str, list] = {}
    for record in records:
        if record.HasField("artifact"):
            found.setdefault(record.artifact.type, []).append(record.artifact.manifest.contents)
    return found


def check_table(folder: Path, records: list) -> None:
    """The table is under the run's folder, with a row a sample and a picture in each."""
    samples, *_ = [
        files
        for files in artifacts_of(records)["run_table"]
        if any(file.path.startswith("samples/") for file in files)
    ]
    paths = {file.path: Path(file.local_path) for file in samples}
    assert all(path.is_relative_to(folder) for path in paths.values())
    table = json.loads(paths["samples/table.table.json"].read_text())
    columns = ["step", "picture", "prompt", "reward", "color", "jpeg_size"]
    assert table["columns"][:6] == columns
    saved = saved_samples(folder)
    assert len(table["data"]) == len(saved)
    for row, sample in zip(table["data"], saved):
        colour, size = sample.rewards.values()
        assert [row[0], *row[2:6]] == [1, sample.caption, sample.reward, colour, size]
        assert paths[row[1]["path"]].stat().st_size > 0


def check_page(page: Path, records: list) -> None:
    ((file,),) = artifacts_of(records)["report"]
    assert file.path == "report.html"
    assert Path(file.local_path).read_bytes() == page.read_bytes()


def test_a_wandb_that_cannot_log_in_says_what_to_do(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ValueError, match="set WANDB_MODE=offline"):
        build_trackers(["wandb"], tmp_path, {})
    assert psutil.Process().children(recursive=True) == before
