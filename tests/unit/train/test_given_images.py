"""What a replica is sent of a prompt: pixels and sizes in place of files, and an error where a file
is no longer what it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.config.schema import Config
from megadiff.models.adapter import ModelAdapter
from megadiff.rollout.limits import Limits
from megadiff.rollout.wire import requests_to_json
from megadiff.train.check import read_prompts
from megadiff.train.sampling import for_replica
from megadiff.types import Prompt, RolloutRequest, Sampling

SAMPLING = Sampling(height=16, width=32, num_inference_steps=4, images=((16, 32),))


class HalfSize(ModelAdapter):
    """Sees images at half their size, and takes up to three of at most 64 pixels."""

    def image_size(self, height: int, width: int, sampling: Sampling) -> tuple[int, int]:
        if min(height, width) < 2:
            raise ValueError(f"a given image has {width}x{height} pixels")
        return height // 2, width // 2

    def validate(self, sampling: Sampling) -> None:
        if len(sampling.images) > 3 or any(max(size) > 64 for size in sampling.images):
            raise ValueError(f"images={sampling.images} are not for this model")


ADAPTER = HalfSize(Path())


def request_of(*files: Path, sampling: Sampling = SAMPLING) -> RolloutRequest:
    prompt = Prompt(text="a", id="0" * 16, images=tuple(map(str, files)), fields={"n": 1})
    return RolloutRequest(prompt=prompt, sampling=sampling, sample_indices=(0,), seed=0, step=0)


def test_pixels_travel_in_the_models_sizes_and_the_paths_stay(tmp_path: Path) -> None:
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (16, 32, 3), dtype=np.uint8)
    small = Image.fromarray(pixels_HWC)
    small.resize((64, 32), Image.Resampling.NEAREST).save(tmp_path / "a.png")
    Image.new("RGB", (20, 8), "red").save(tmp_path / "b.png")
    sent = for_replica(request_of(tmp_path / "a.png", tmp_path / "b.png"), ADAPTER)
    assert sent.sampling.images == ((16, 32), (4, 10))
    assert [len(image) for image in sent.images] == [16 * 32 * 3, 4 * 10 * 3]
    # Lanczos rings a little, so doubled pixels do not come back exactly
    found_HWC = np.frombuffer(sent.images[0], np.uint8).reshape(16, 32, 3).astype(int)
    assert np.abs(found_HWC - pixels_HWC).mean() < 20
    assert sent.images[1] == b"\xff\x00\x00" * 40
    assert (sent.prompt.images, sent.prompt.fields) == ((), {})


def test_without_given_images_nothing_is_read(tmp_path: Path) -> None:
    plain = replace(SAMPLING, images=())
    sent = for_replica(request_of(tmp_path / "gone.png", sampling=plain), ADAPTER)
    assert sent.images == sent.sampling.images == sent.prompt.images == ()


@pytest.mark.parametrize(("side", "most"), [((704, 1280), 18), ((480, 832), 40)])
def test_as_many_requests_fit_a_calls_body_as_the_limits_say(
    side: tuple[int, int], most: int
) -> None:
    assert Limits().num_requests([side]) == most
    assert Limits().num_requests([side, side]) == most // 2
    assert Limits().num_requests([]) >= Limits().batch_size
    longest = Prompt(text="🧱" * 2000, negative_text="🧱" * 2000, id="0" * 16)
    request = RolloutRequest(
        prompt=longest,
        sampling=replace(SAMPLING, images=(side,)),
        sample_indices=tuple(range(1024)),
        seed=2**62,
        step=9999,
        policy_version=9999,
        images=(bytes(3 * side[0] * side[1]),),
    )
    assert len(json.dumps(requests_to_json([request]))) * most <= Limits().json_bytes


def test_a_file_that_changed_since_the_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"prompt 0{16} \('a'\): the image cannot be read .*gone.png"
    ):
        for_replica(request_of(tmp_path / "gone.png"), ADAPTER)
    Image.new("RGB", (32, 320)).save(tmp_path / "other.png")
    with pytest.raises(ValueError, match=r"other.png: images=\(\(160, 16\),\) are not for this"):
        for_replica(request_of(tmp_path / "other.png"), ADAPTER)
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    with pytest.raises(ValueError, match=r"dot.png: a given image has 1x1 pixels"):
        for_replica(request_of(tmp_path / "other.png", tmp_path / "dot.png"), ADAPTER)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        (((32, 32),) * 4, "prompts.jsonl:2: .* are not for this model"),
        (((9000, 8000),), "prompts.jsonl:2: 1 images of 54000000 bytes, a request takes 16 and"),
    ],
)
def test_rows_with_images_that_no_request_can_bring_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[tuple[int, int]], match: str
) -> None:
    if len(sizes) == 1:
        monkeypatch.setattr(HalfSize, "validate", lambda self, sampling: None)
    names = [f"{index}.png" for index in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        Image.new("L", size).save(tmp_path / name)
    Image.new("L", (32, 32)).save(tmp_path / "good.png")
    rows = [{"prompt": "a", "images": ["good.png"] * 3}, {"prompt": "b", "images": names}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    config.rollout.height = config.rollout.width = 32
    config.rollout.images = True
    with pytest.raises(ValueError, match=match):
        read_prompts(config, str(path), ADAPTER)
