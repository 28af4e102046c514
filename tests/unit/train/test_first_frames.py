"""What a replica is sent of a prompt: pixels in place of a file, and an error where the file is no
longer what it was.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.config.schema import Config
from megadiff.rollout.limits import Limits
from megadiff.rollout.wire import requests_to_json
from megadiff.train.check import check_call
from megadiff.train.evaluate import groups_in_a_call, spread
from megadiff.train.sampling import for_replica
from megadiff.types import Prompt, RolloutRequest, Sampling

SAMPLING = Sampling(height=16, width=32, num_frames=5, first_frame=True, num_inference_steps=4)


def request_of(path: Path) -> RolloutRequest:
    prompt = Prompt(text="a", id="0" * 16, image=str(path), fields={"n": 1})
    return RolloutRequest(prompt=prompt, sampling=SAMPLING, sample_indices=(0,), seed=0, step=0)


def test_pixels_travel_and_the_path_stays(tmp_path: Path) -> None:
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (16, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels_HWC).save(tmp_path / "a.png")
    sent = for_replica(request_of(tmp_path / "a.png"))
    assert sent.first_frame == pixels_HWC.tobytes() and (sent.prompt.image, sent.prompt.fields) == (
        "",
        {},
    )


def test_without_first_frames_nothing_is_read(tmp_path: Path) -> None:
    plain = replace(SAMPLING, first_frame=False)
    sent = for_replica(replace(request_of(tmp_path / "gone.png"), sampling=plain))
    assert sent.first_frame == b""


@pytest.mark.parametrize(("side", "most"), [((704, 1280), 18), ((480, 832), 40)])
def test_a_call_holds_as_many_first_frames_as_a_replica_takes(
    side: tuple[int, int], most: int
) -> None:
    sampling = replace(SAMPLING, height=side[0], width=side[1])
    check_call(sampling, most, what="a step")
    check_call(replace(sampling, first_frame=False), 1000, what="a step")
    with pytest.raises(
        ValueError, match=rf"a step ask for {most + 1} groups .* set rollout.batch_size<={most}$"
    ):
        check_call(sampling, most + 1, what="a step")
    longest = Prompt(text="🧱" * 2000, negative_text="🧱" * 2000, id="0" * 16)
    request = RolloutRequest(
        prompt=longest,
        sampling=sampling,
        sample_indices=tuple(range(1024)),
        seed=2**62,
        step=9999,
        policy_version=9999,
        first_frame=bytes(3 * side[0] * side[1]),
    )
    assert len(json.dumps(requests_to_json([request]))) * most <= Limits().json_bytes


@pytest.mark.parametrize(("num_samples", "expected"), [(0, 7), (14, 4), (10, 4), (35, 1), (100, 1)])
def test_how_many_groups_an_evaluation_asks_for_at_once(num_samples: int, expected: int) -> None:
    """Seven prompts in calls of up to eight samples."""
    prompts = [Prompt(text=str(number), id=f"{number:016d}") for number in range(7)]
    config = Config()
    config.rollout.height = 16
    config.rollout.width = 32
    config.rollout.num_frames = 5
    config.rollout.batch_size = 8
    assert groups_in_a_call(spread(prompts, num_samples), config) == expected


def test_a_file_that_changed_since_the_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"prompt 0{16} \('a'\): the image cannot be read .*gone.png"
    ):
        for_replica(request_of(tmp_path / "gone.png"))
    Image.new("RGB", (32, 32)).save(tmp_path / "other.png")
    with pytest.raises(ValueError, match=r"other.png has 32x32 pixels, .* video's 32x16"):
        for_replica(request_of(tmp_path / "other.png"))
