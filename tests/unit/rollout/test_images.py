"""What the images API takes: a plain request, and nothing past its bounds."""

from __future__ import annotations

import pytest

from megadiff.rollout.limits import Limits
from megadiff.rollout.server.images import check_image_request

PLAIN = {"prompt": "a red star", "size": "512x512", "n": 4, "num_inference_steps": 20, "seed": 1}


def test_a_plain_request_is_taken() -> None:
    assert check_image_request(PLAIN | {"user": None}, Limits()) == PLAIN
    assert check_image_request({"prompt": "x"}, Limits()) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_inference_steps": 10**9}, "num_inference_steps=1000000000 must be 1 to 200"),
        ({"n": 10**400}, "n=10{19} must be 1 to 10"),  # no float can hold it
        ({"num_inference_steps": 0}, "must be 1 to 200"),
        ({"num_inference_steps": True}, "is a bool"),
        ({"size": "40000x40000"}, "width=40000 must be 1 to 4096"),
        ({"size": "4096x4096", "n": 2}, "are 33554432 pixels, a request takes at most 16777216"),
        ({"size": "4096x4096", "n": 1, "num_inference_steps": 200}, "ask for fewer steps"),
        ({"size": "0x512"}, "width=0"),
        ({"size": "512"}, "must be WIDTHxHEIGHT"),
        ({"size": "1e3x512"}, "must be WIDTHxHEIGHT"),
        ({"n": 11}, "n=11 must be 1 to 10"),
        ({"prompt": "x" * 2001}, "2001 characters"),
        ({"prompt": ""}, "needs 'prompt'"),
        ({"prompt": ["x"]}, "is a list"),
        ({"negative_prompt": "\ud800"}, "lone surrogate"),
        ({"lora": {"path": "/etc"}}, "without a LoRA of its own"),
        ({"extra_params": {"megadiff_stop": "/x"}}, "unknown keys extra_params"),
        ({"generator_device": "cuda:7"}, "unknown keys generator_device"),
    ],
)
def test_what_is_past_a_bound_is_refused(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_image_request(PLAIN | change, Limits())


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="the body is a list; it must be a JSON object"):
        check_image_request([], Limits())
