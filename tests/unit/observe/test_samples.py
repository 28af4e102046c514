import dataclasses
import json
import math

import av
import numpy as np
import pytest
import torch
from PIL import Image
from synthetic_run import PROMPTS, picture, samples_of

from megadiff.observe.samples import (
    frame_strip,
    picture_grid,
    read_samples,
    save_samples,
    write_picture,
)
from megadiff.observe.video import read_frames, shrunk_video
from megadiff.report import pictures
from megadiff.report.pictures import load_pictures, strips


def test_samples_come_back_with_exact_pixels_and_every_field(tmp_path):
    samples = samples_of(3, num_steps=10)
    folder = save_samples(tmp_path, step=3, samples=samples)
    assert folder == tmp_path / "samples" / "step_000003"
    saved = read_samples(tmp_path)
    assert len(saved) == len(samples) == len({item.path.name for item in saved})
    for item, sample in zip(saved, samples):
        assert np.array_equal(np.asarray(Image.open(item.path)), sample.pixels[0].numpy())
        for name in ("caption", "reward", "prompt_id", "sample_index", "policy_version"):
            assert getattr(item, name) == getattr(sample, name)
        assert dict(item.rewards) == dict(sample.rewards) and item.step == 3


@pytest.mark.parametrize(
    "caption", [*PROMPTS, "", "../../etc/passwd", "nul\0\n", "x" * 2000, "CON"]
)
def test_any_caption_gives_a_plain_file_name(tmp_path, caption):
    sample = dataclasses.replace(samples_of(1, num_steps=1, size=8)[0], caption=caption)
    folder = save_samples(tmp_path, step=1, samples=[sample, sample])
    names = sorted(path.name for path in folder.glob("*.png"))
    assert len(names) == 2
    assert all(
        name.isascii()
        and len(name) < 64
        and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-.")
        for name in names
    )
    assert [item.caption for item in read_samples(tmp_path)] == [caption, caption]


def test_saving_a_step_again_replaces_it(tmp_path):
    save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=2, size=8))
    folder = save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=2, size=8)[:1])
    assert len(list(folder.glob("*.png"))) == 1
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_000001"]


def test_a_reward_that_is_not_finite_is_null(tmp_path):
    sample = dataclasses.replace(
        samples_of(1, num_steps=1, size=8)[0], reward=math.nan, rewards={"ocr": math.inf}
    )
    folder = save_samples(tmp_path, step=1, samples=[sample])
    entry = json.loads((folder / "samples.jsonl").read_text(), parse_constant=pytest.fail)
    assert entry["reward"] is None and entry["rewards"] == {"ocr": None}


def test_torn_lines_and_lost_images_are_left_out(tmp_path):
    folder = save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=1, size=8))
    index = folder / "samples.jsonl"
    (folder / json.loads(index.read_text().splitlines()[0])["file"]).unlink()
    index.write_text(index.read_text() + '{"file": "x.png"}\n[]\n{"file": "000_a')
    assert len(read_samples(tmp_path)) == len(samples_of(1, num_steps=1)) - 1


def test_pixels_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"torch.float32 \[1, 8, 8, 3\], not uint8 \[F, H, W, 3\]"):
        frame_strip(torch.zeros(1, 8, 8, 3))


def test_a_video_becomes_its_first_to_last_frames_in_a_row():
    pixels = torch.arange(9, dtype=torch.uint8)[:, None, None, None].expand(9, 4, 4, 3)
    assert frame_strip(pixels)[0, ::4, 0].tolist() == [0, 3, 5, 8]


def test_the_grid_places_samples_row_by_row_on_white():
    samples = samples_of(1, num_steps=1, size=8)
    samples[1] = dataclasses.replace(samples[1], pixels=picture(0.5, sharpness=1.0, size=6))
    grid = picture_grid([sample.pixels for sample in samples[:5]], columns=3)
    assert grid.shape == (3, 18, 28) and grid.dtype == torch.uint8
    assert torch.equal(grid[:, 10:18, 0:8], samples[3].pixels[0].permute(2, 0, 1))
    assert torch.equal(grid[:, :6, 10:16], samples[1].pixels[0].permute(2, 0, 1))
    assert bool((grid[:, 10:18, 20:28] == 255).all())
    with pytest.raises(ValueError, match="0 samples"):
        picture_grid([])


def test_captions_may_hold_what_ends_a_line_elsewhere(tmp_path):
    captions = ["a\u2028cat", "b\x85", "c\u2029d", "e\x1cf", "g\x0bh", "i\rj"]
    (sample,) = samples_of(1, num_steps=1)[:1]
    samples = [dataclasses.replace(sample, caption=caption) for caption in captions]
    save_samples(tmp_path, step=1, samples=samples)
    assert [saved.caption for saved in read_samples(tmp_path)] == captions


def test_lines_that_are_no_json_are_skipped(tmp_path, caplog):
    folder = save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=1)[:1])
    damaged = ["[" * 100_000, "9" * 5000, "null", '{"file": 3}', '{"file": "a.png", "x": ']
    with (folder / "samples.jsonl").open("a") as index:
        index.write("\n".join(damaged) + "\n")
    assert len(read_samples(tmp_path)) == 1
    assert caplog.text.count("is no sample and skipped") == len(damaged)


def test_a_video_is_saved_as_one_that_every_browser_plays(tmp_path):
    samples = samples_of(3, num_steps=3, num_frames=9)
    save_samples(tmp_path, step=3, samples=samples)
    saved = read_samples(tmp_path)
    assert [item.path.suffix for item in saved] == [".mp4"] * len(samples)
    with av.open(str(saved[0].path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec.name, stream.pix_fmt, stream.frames, stream.average_rate) == (
            "h264",
            "yuv420p",
            9,
            16,
        )
    frames = np.stack(list(read_frames(saved[0].path))).astype(int)
    assert frames.shape == (9, 64, 64, 3)
    # 4:2:0 halves the resolution of colour, so brightness is what comes back
    assert np.abs(frames.mean(axis=-1) - samples[0].pixels.float().mean(dim=-1).numpy()).mean() < 6


def test_a_torn_video_is_left_out_of_the_report(tmp_path):
    folder = save_samples(
        tmp_path, step=3, samples=samples_of(3, num_steps=3, num_frames=5, size=32)
    )
    torn = sorted(folder.glob("*.mp4"))
    torn[0].write_bytes(torn[0].read_bytes()[:-200])
    torn[2].write_bytes(b"")
    looks = [look for strip in strips(read_samples(tmp_path)) for look in strip["looks"] if look]
    pictures = [look["picture"] for look in looks if look["picture"]]
    assert len(pictures) == len(PROMPTS) - 2
    assert all(picture.url.startswith("data:video/mp4;base64,") for picture in pictures)


@pytest.mark.parametrize("size", [(1, 1), (33, 65), (32, 64)])
def test_videos_of_any_size_are_written(tmp_path, size):
    height, width = size
    write_picture(tmp_path / "a.mp4", torch.full((3, height, width, 3), 200, dtype=torch.uint8))
    frames = list(read_frames(tmp_path / "a.mp4"))
    assert len(frames) == 3 and frames[0].shape[:2] == (
        max(2, height // 2 * 2),
        max(2, width // 2 * 2),
    )
    assert abs(int(frames[0].mean()) - 200) <= 2


def test_a_video_is_as_fast_as_its_model_says_also_when_shrunk(tmp_path):
    (sample,) = samples_of(1, num_steps=1, num_frames=12, size=64)[:1]
    folder = save_samples(tmp_path, step=1, samples=[dataclasses.replace(sample, frames_per_s=24)])
    path = next(folder.glob("*.mp4"))
    (tmp_path / "small.mp4").write_bytes(shrunk_video(path, 32))
    for each in (path, tmp_path / "small.mp4"):
        with av.open(str(each)) as container:
            assert container.duration / av.time_base == pytest.approx(12 / 24, abs=0.01)


def test_large_videos_become_small_ones_in_a_page(tmp_path, monkeypatch):
    path = (
        save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=2, num_frames=5, size=400))
        / "copy.mp4"
    )
    path.write_bytes(min(path.parent.glob("*.mp4")).read_bytes())
    whole = load_pictures([path])[path]
    monkeypatch.setattr(pictures, "SECTION_BYTES", len(whole.data) // 2)
    small = load_pictures([path])[path]
    assert small.size == whole.size == (400, 400) and len(small.data) <= len(whole.data) // 2
    (tmp_path / "small.mp4").write_bytes(small.data)
    assert len(list(read_frames(tmp_path / "small.mp4"))) == 5
