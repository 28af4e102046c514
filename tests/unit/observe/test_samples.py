import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic_run import PROMPTS, picture, samples_of

from megadiff.observe.samples import frame_strip, read_samples, sample_grid, save_samples


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


@pytest.mark.parametrize("caption", [*PROMPTS, "", "../../etc/passwd", "nul\0\n", "x" * 2000, "CON"])
def test_any_caption_gives_a_plain_file_name(tmp_path, caption):
    sample = dataclasses.replace(samples_of(1, num_steps=1, size=8)[0], caption=caption)
    folder = save_samples(tmp_path, step=1, samples=[sample, sample])
    names = sorted(path.name for path in folder.glob("*.png"))
    assert len(names) == 2
    assert all(
        name.isascii() and len(name) < 64 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-.")
        for name in names
    )
    assert [item.caption for item in read_samples(tmp_path)] == [caption, caption]


def test_saving_a_step_again_replaces_it(tmp_path):
    save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=2, size=8))
    folder = save_samples(tmp_path, step=1, samples=samples_of(1, num_steps=2, size=8)[:1])
    assert len(list(folder.glob("*.png"))) == 1
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_000001"]


def test_a_reward_that_is_not_finite_is_null(tmp_path):
    sample = dataclasses.replace(samples_of(1, num_steps=1, size=8)[0], reward=math.nan, rewards={"ocr": math.inf})
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
    grid = sample_grid(samples[:5], columns=3, gap=2)
    assert grid.shape == (3, 18, 28) and grid.dtype == torch.uint8
    assert torch.equal(grid[:, 10:18, 0:8], samples[3].pixels[0].permute(2, 0, 1))
    assert torch.equal(grid[:, :6, 10:16], samples[1].pixels[0].permute(2, 0, 1))
    assert bool((grid[:, 10:18, 20:28] == 255).all())
    with pytest.raises(ValueError, match="0 samples"):
        sample_grid([])
