"""What a worker prepares of the call that waits, while it draws another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadiff.models.pipeline_base import CallInputs
from megadiff.rollout.next_call import NEXT_NAME, NextCall, WaitingCalls
from megadiff.types import Prompt, RolloutRequest, Sampling

SAMPLING = Sampling(height=64, width=64, num_inference_steps=4, eta=0.7)


def _request(text: str, **changed: object) -> RolloutRequest:
    request = RolloutRequest(
        prompt=Prompt(id=text, text=text, fields={}),
        sampling=SAMPLING,
        sample_indices=(0, 1),
        seed=3,
        step=1,
        policy_version=7,
    )
    return replace(request, **changed)


def _inputs(requests: Sequence[RolloutRequest]) -> CallInputs:
    if any(len(request.prompt.text) > 9 for request in requests):
        raise ValueError("the prompt is too long")
    embeds = torch.tensor([float(len(request.prompt.text)) for request in requests])
    return CallInputs(conditioning={"prompt_embeds": embeds}, noise_NLC=torch.zeros(1))


@pytest.fixture
def calls(tmp_path: Path) -> WaitingCalls:
    return WaitingCalls(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / NEXT_NAME


def test_the_call_that_waits_is_prepared_once(calls: WaitingCalls, file: Path) -> None:
    drawn, after = (_request("a"),), (_request("é, ☃"), _request("cc"))
    ahead = NextCall(file.parent, torch.device("cpu"))
    with calls.waiting(drawn), calls.waiting(after):
        ahead.prepare(drawn, _inputs)
    inputs = ahead.take(after)
    assert inputs is not None
    assert torch.equal(inputs.conditioning["prompt_embeds"], torch.tensor([4.0, 2.0]))
    assert ahead.take(after) is None, "inputs are of one call"
    assert not file.exists()


def test_the_file_names_the_second_call_in_the_order_of_their_coming(
    calls: WaitingCalls, file: Path
) -> None:
    first, second, third = ((_request(text),) for text in "abc")
    ahead = NextCall(file.parent, torch.device("cpu"))
    with calls.waiting(second):
        # the call before is over, but the server has not heard of it: the file names the current
        with calls.waiting(third):
            ahead.prepare(third, _inputs)
            assert ahead.take(third) is None
            ahead.prepare(second, _inputs)
        assert not file.exists()
        with calls.waiting(first):
            assert '"a"' in file.read_text()
    assert ahead.take(third) is not None


@pytest.mark.parametrize("changed", [{"seed": 4}, {"sample_indices": (0,)}, {"policy_version": 8}])
def test_another_call_takes_nothing_of_it(
    calls: WaitingCalls, file: Path, changed: dict[str, object]
) -> None:
    drawn, after = (_request("a"),), (_request("b"),)
    ahead = NextCall(file.parent, torch.device("cpu"))
    with calls.waiting(drawn), calls.waiting(after):
        ahead.prepare(drawn, _inputs)
    assert ahead.take((_request("b", **changed),)) is None
    assert ahead.take(after) is None, "it was dropped"


def test_a_call_that_cannot_be_prepared_harms_no_other(calls: WaitingCalls, file: Path) -> None:
    drawn, long = (_request("a"),), (_request("a long prompt"),)
    ahead = NextCall(file.parent, torch.device("cpu"))
    with calls.waiting(drawn), calls.waiting(long):
        ahead.prepare(drawn, _inputs)
    assert ahead.take(long) is None
    file.write_text("[{")
    ahead.prepare(drawn, _inputs)
    file.unlink()
    ahead.prepare(drawn, _inputs)


def test_what_fails_in_preparing_is_logged_and_harms_no_other(
    calls: WaitingCalls, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(requests: Sequence[RolloutRequest]) -> CallInputs:
        raise RuntimeError("out of registers")

    drawn, after = (_request("a"),), (_request("b"),)
    ahead = NextCall(file.parent, torch.device("cpu"))
    with calls.waiting(drawn), calls.waiting(after):
        ahead.prepare(drawn, broken)
    assert ahead.take(after) is None
    assert "out of registers" in caplog.text


def test_what_is_prepared_is_forgotten_before_weights_change(
    calls: WaitingCalls, file: Path
) -> None:
    drawn, after = (_request("a"),), (_request("b"),)
    ahead = NextCall(file.parent, torch.device("cpu"))
    with calls.waiting(drawn), calls.waiting(after):
        ahead.prepare(drawn, _inputs)
    ahead.drop()
    assert ahead.take(after) is None


def test_given_images_are_not_prepared(calls: WaitingCalls, file: Path) -> None:
    sampling = replace(SAMPLING, images=((1, 1),))
    edit = (_request("b", sampling=sampling, images=(b"abc",)),)
    with calls.waiting((_request("a"),)), calls.waiting(edit):
        assert not file.exists()
