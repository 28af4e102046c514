"""Every bound of a request is checked, and the text says which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megadiff.rollout.limits import Limits
from megadiff.rollout.server.requests import check_request, check_requests
from megadiff.types import Prompt, RolloutRequest, Sampling

LIMITS = Limits(
    group_size=4,
    batch_size=7,
    side=128,
    num_frames=9,
    pixels=2**16,
    num_inference_steps=20,
    prompt_chars=50,
)
GOOD = RolloutRequest(
    prompt=Prompt(text="a cat", id="0" * 16),
    sampling=Sampling(height=64, width=64, num_inference_steps=6),
    sample_indices=(0, 1),
    seed=0,
    step=0,
)


def model_rule(sampling: Sampling) -> None:
    if sampling.height % 16:
        raise ValueError(f"height={sampling.height} is not for this model")


def test_good_requests() -> None:
    check_request(replace(GOOD, sampling=replace(GOOD.sampling, num_frames=9)), LIMITS, model_rule)
    check_request(GOOD, LIMITS, model_rule)
    check_request(replace(GOOD, prompt=replace(GOOD.prompt, text="猫" * 50)), LIMITS, model_rule)
    ode = replace(GOOD.sampling, sde_type="ode", num_inference_steps=1, eta=0.0)
    check_request(replace(GOOD, sampling=ode), LIMITS, model_rule)
    shared = replace(GOOD.sampling, same_noise=True, ode_solver="dpm2")
    check_request(replace(GOOD, sampling=shared), LIMITS, model_rule)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"height": 72}, "height=72 is not for this model"),
        ({"width": 144}, "width=144 must be 1 to 128"),
        ({"width": 0}, "width=0"),
        ({"num_frames": 10}, "num_frames=10 must be 1 to 9"),
        ({"num_frames": 0}, "num_frames=0"),
        (
            {"num_frames": 5, "height": 128, "width": 128},
            "5 frames of 128x128 are 81920 pixels, .* at most 65536",
        ),
        ({"guidance_scale_2": -1.0}, "guidance_scale_2=-1.0"),
        ({"num_inference_steps": 21}, "num_inference_steps=21 must be 1 to 20"),
        ({"sde_type": "euler"}, "sde_type='euler' is not one of"),
        ({"eta": float("nan")}, "eta=nan"),
        ({"eta": 0.0}, "eta=0"),
        ({"eta": 1.5, "sde_type": "flow_cps"}, "flow_cps must be at most 1"),
        ({"true_cfg_scale": -1.0}, "true_cfg_scale=-1.0"),
        ({"ode_solver": "heun"}, "ode_solver='heun' is not one of euler, dpm2"),
        (
            {"same_noise": True, "sde_window_size": 0},
            "same_noise with sde_type=flow_sde and sde_window_size=0: .*set same_noise=false",
        ),
        ({"same_noise": True, "sde_type": "ode"}, "same_noise with sde_type=ode"),
        ({"latents_dtype": "int8"}, "latents_dtype='int8'"),
        ({"sde_window_size": 6}, "sde_window_size=6"),
        ({"sde_window_range": (0, 6)}, "sde_window_range"),
    ],
)
def test_bad_sampling(changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_request(replace(GOOD, sampling=replace(GOOD.sampling, **changes)), LIMITS, model_rule)


def test_images_have_the_samplings_sizes() -> None:
    given = replace(GOOD, sampling=replace(GOOD.sampling, images=((64, 32), (1, 2))))
    check_request(replace(given, images=(bytes(64 * 32 * 3), bytes(6))), LIMITS, model_rule)
    huge = replace(GOOD.sampling, images=((1, 129),))
    for bad, match in (
        (given, "the request has 0 images, its sampling 2; send as many, at most 16"),
        (replace(GOOD, images=(b"",)), "the request has 1 images, its sampling 0"),
        (
            replace(GOOD, images=(b"abc",) * 17, sampling=replace(huge, images=((1, 1),) * 17)),
            "has 17 images, .* at most 16",
        ),
        (
            replace(given, images=(bytes(6144), bytes(7))),
            r"images\[1\] has 7 bytes, the 2x1 that the sampling says need 6",
        ),
        (replace(GOOD, images=(bytes(387),), sampling=huge), r"images\[0\] width=129 must be 1"),
    ):
        with pytest.raises(ValueError, match=match):
            check_request(bad, LIMITS, model_rule)


@pytest.mark.parametrize(
    ("indices", "match"),
    [((), "0 sample_indices"), ((0, 1, 2, 3, 4), "5 sample_indices"), ((2, 2), "twice")],
)
def test_bad_groups(indices: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_request(replace(GOOD, sample_indices=indices), LIMITS, model_rule)


@pytest.mark.parametrize(
    ("text", "match"), [("x" * 51, "51 characters, at most 50"), ("a\ud800", "surrogate")]
)
def test_bad_texts(text: str, match: str) -> None:
    for prompt in (replace(GOOD.prompt, text=text), replace(GOOD.prompt, negative_text=text)):
        with pytest.raises(ValueError, match=match):
            check_request(replace(GOOD, prompt=prompt), LIMITS, model_rule)


def other(place: int, **changes: object) -> RolloutRequest:
    return replace(GOOD, prompt=replace(GOOD.prompt, id=f"{place:016x}"), **changes)


def test_a_batch_may_differ_in_all_but_the_sampling() -> None:
    check_requests([GOOD], LIMITS, model_rule)
    check_requests(
        [GOOD, other(1, seed=5), other(2, step=-1, sample_indices=(7, 8, 9))], LIMITS, model_rule
    )


def test_a_fault_in_a_batch_names_the_request() -> None:
    cases = {
        "twice": other(1, sample_indices=(2, 2)),
        "height=72": other(1, sampling=replace(GOOD.sampling, height=72)),
        "eta=nan": other(1, sampling=replace(GOOD.sampling, eta=float("nan"))),
        "surrogate": replace(GOOD, prompt=replace(GOOD.prompt, id="0" * 15 + "1", text="\ud800")),
    }
    for text, bad in cases.items():
        with pytest.raises(
            ValueError, match=rf"^requests\[1\] \(prompt 0000000000000001\): .*{text}"
        ):
            check_requests([GOOD, bad, GOOD], LIMITS, model_rule)


def test_batches_that_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        check_requests([], LIMITS, model_rule)
    with pytest.raises(ValueError, match=r"requests\[1\] has eta=0.5, requests\[0\] has eta=0.7"):
        check_requests(
            [GOOD, other(1, sampling=replace(GOOD.sampling, eta=0.5))], LIMITS, model_rule
        )
    given = replace(GOOD.sampling, images=((1, 1),))
    with pytest.raises(
        ValueError, match=r"\[1\] has images=\(\(1, 1\),\), requests\[0\] has images"
    ):
        check_requests([GOOD, other(1, sampling=given, images=(b"abc",))], LIMITS, model_rule)
    with pytest.raises(ValueError, match="4 requests ask for 8 samples, a call takes 7"):
        check_requests([other(place) for place in range(4)], LIMITS, model_rule)
