"""The reward vlm against arithmetic written out here, and a server that answers by the book."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from megadiff.config.rewards import JudgeConfig, RewardConfig
from megadiff.rewards.base import Reward, RewardContext, RewardSample, ScoreFailed, build_reward
from megadiff.rewards.vlm_answers import number_in
from megadiff.rewards.vlm_client import given_url
from tests.unit.rewards.vlm_server import FakeVlm, reply

UNIFIED_15 = r"Final Score:\s*([\d.]+)"
UNIFIED_20 = (
    r"Alignment Score \(1-5\):\s*([\d.]+).*Coherence Score \(1-5\):\s*([\d.]+)"
    r".*Style Score \(1-5\):\s*([\d.]+)"
)
Opened = Callable[..., Reward]


@pytest.fixture
def vlm() -> Iterator[FakeVlm]:
    with FakeVlm().running() as server:
        yield server


@pytest.fixture
def opened(vlm: FakeVlm) -> Iterator[Opened]:
    """(**args) → the reward "look" of these args, open, of the fake server's."""
    rewards = []

    def make(**args: object) -> Reward:
        context = RewardContext(device=torch.device("cpu"), judges={"fake": [vlm.url]})
        args = args if "url" in args else {"judge": "fake", **args}
        reward = build_reward("look", RewardConfig(type="vlm", args=args))
        rewards.append(reward)
        reward.open(context)
        vlm.questions.clear()
        return reward

    yield make
    for reward in rewards:
        reward.close()


@pytest.fixture
def grey(make_sample: Callable[..., RewardSample]) -> Callable[..., RewardSample]:
    """(grey level, prompt text, **fields) → a sample whose number in the group is its level."""

    def make(level: int, text: str = "a red cup", /, **fields: object) -> RewardSample:
        pixels = np.full((3, 8, 16, 3), 255, np.uint8)
        pixels[1] = level  # the middle frame of three
        return replace(make_sample(pixels, text, **fields), sample_index=level)

    return make


def test_the_expectation_is_over_all_written_forms(vlm, opened, grey):
    vlm.chances = lambda question, levels: {
        "Yes": 0.2, "yes": 0.1, " Yes": 0.05, " yes": 0.05, "No": 0.08, " no": 0.02, "A": 0.3,
    }  # fmt: skip
    reward = opened()
    assert (reward.workers, reward.samples_per_call) == (32, 1)
    assert reward.score([grey(7)]) == [pytest.approx(0.4 / 0.5)]
    assert reward.figures() == {"retries": 0.0, "mass": pytest.approx(0.5)}
    assert vlm.questions == [
        {"question": 'Does this image show "a red cup"? Please answer yes or no.', "levels": [7]}
    ]


def test_a_scale_of_numbers_leaves_out_the_token_of_a_space(vlm, opened, grey):
    chances = {"1": 0.1, "2": 0.05, "3": 0.15, "4": 0.2, "5": 0.3, " ": 0.2}
    vlm.chances = lambda question, levels: chances
    values = {1: 0, 2: 0.25, 3: 0.5, 4: 0.75, 5: 1}
    expected = sum(values[int(word)] * p for word, p in chances.items() if word != " ") / 0.8
    reward = opened(answers=values, question="Rate {prompt} as {style}, 1 to 5.")
    assert reward.score([grey(0, "a <|im_end|>cup", style="<<|x|>|im_start|>oil")]) == [
        pytest.approx(expected)
    ]
    assert vlm.questions[0]["question"] == "Rate a cup as oil, 1 to 5."
    assert reward.figures()["mass"] == pytest.approx(0.8)


def test_unlikely_answers_count_where_ids_are_known_and_else_fail_the_sample(
    vlm, opened, grey, caplog
):
    vlm.chances = lambda question, levels: {"yes": 3e-4, "no": 1e-4}
    exact = opened()
    assert exact.score([grey(0)]) == [pytest.approx(0.75)]
    assert exact.figures()["mass"] == pytest.approx(4e-4)
    assert "have 0.00 of the first token's probability, below 0.5" in caplog.text
    vlm.knows_ids = False
    with pytest.raises(ScoreFailed, match="asked for the log_probs of 8 tokens, 8 are not in"):
        exact.score([grey(0)])
    reward = opened()
    assert "not among the 20 likeliest tokens count as impossible" in caplog.text
    assert reward.score([grey(0)]) == [None]
    assert "none of the answers ['yes', 'no'] is among" in caplog.text
    # Without /tokenize, answers are found by their text.
    vlm.tokenizes = False
    vlm.chances = lambda question, levels: {" Yes": 0.3, "no": 0.6}
    assert opened().score([grey(0)]) == [pytest.approx(0.3 / 0.9)]


def test_a_key_is_sent_to_servers_of_one_s_own(vlm, opened, grey, monkeypatch):
    sent = []
    vlm.fault = lambda handler: sent.append(handler.headers["Authorization"])
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    opened(url=vlm.url, token_env="JUDGE_KEY").score([grey(0)])
    assert set(sent) == {"Bearer s3cret"}


def test_the_mass_is_warned_of_once(vlm, opened, grey, caplog):
    vlm.chances = lambda question, levels: {"yes": 0.2}
    reward = opened()
    for _ in range(2):
        reward.score([grey(0)])
        assert reward.figures()["mass"] == pytest.approx(0.2)
    assert caplog.text.count("A thinking model") == 1
    assert reward.figures() == {"retries": 0.0}


@pytest.mark.parametrize(
    ("pattern", "scale", "text", "score"),
    [
        (UNIFIED_15, [0, 5], "cup (object): 1\nFinal Score: 3.5", 0.7),
        (UNIFIED_15, [1, 5], "Final Score: 2, no: Final Score: 4", 0.75),
        (
            UNIFIED_20,
            [1, 5],
            "Alignment Score (1-5): 4.5\nCoherence Score (1-5): 3\nStyle Score (1-5): 2.25",
            ((4.5 + 3 + 2.25) / 3 - 1) / 4,
        ),
        (UNIFIED_20, [1, 5], "Alignment Score (1-5): 4.5\nStyle Score (1-5): 2.25", None),
        (UNIFIED_15, [1, 5], "Final Score: very good", None),
        (UNIFIED_15, [1, 5], "Final Score: 45", None),
        (UNIFIED_15, [1, 5], "Final Score: 4.5.", None),
        (UNIFIED_15, [1, 5], "", None),
    ],
)
def test_numbers_in_text(vlm, opened, grey, caplog, pattern, scale, text, score):
    vlm.text = text
    reward = opened(pattern=pattern, scale=scale, question="Rate this.")
    assert reward.score([grey(3)]) == [score if score is None else pytest.approx(score)]
    assert ("failed on sample 3 of prompt 'a red cup'" in caplog.text) == (score is None)


def test_reading_is_scored_as_ocr_is(vlm, opened, grey):
    vlm.text = "OPEM at nine"
    sample = grey(0, 'a sign that says "Open at nine"')
    assert opened(read="ocr").score([sample]) == [pytest.approx(1 - 1 / 10)]
    with pytest.raises(ValueError, match="text to look for"):
        opened(read="ocr").validate([grey(0, "a cup").prompt])


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
def test_soft_tifa(vlm, opened, grey, mean):
    """GenEval 2: each question's P(answer), of a count as word and digits."""
    answers = {
        "How many cups are there?": {"three": 0.3, "3": 0.2, "2": 0.4},
        "What colour is the cup?": {"red": 0.1, " Red": 0.15},
        "Is there a cup?": {"yes": 0.8},
    }
    vlm.chances = lambda question, levels: answers.get(
        question.removesuffix(" Answer in one word."), {}
    )
    rows = [["How many cups are there?", "3"], ["What colour is the cup?", "red"]]
    rows.append(["Is there a cup?", "Yes"])
    probabilities = [0.5, 0.25, 0.8]
    expected = sum(probabilities) / 3
    if mean == "geometric":
        expected = math.exp(sum(map(math.log, probabilities)) / 3)
    reward = opened(questions="vqa", mean=mean)
    assert reward.score([grey(0, vqa=rows)]) == [pytest.approx(expected)]
    assert "mass" not in reward.figures()  # P(answer) is what the pictures are to change
    for wrong in (None, [], "text", [["Is there a cup?"]], [["Is there a cup?", " "]], [["a", 3]]):
        with pytest.raises(ValueError, match=r"need \[\[question, answer\], …\]"):
            reward.validate([grey(0, vqa=wrong).prompt])


def _prefers_brighter(question: str, levels: list[int]) -> dict[str, float]:
    """Answer as a judge would that likes bright pictures, and the first place."""
    if len(levels) < 2:
        return {"A": 1.0}
    better = 1 / (1 + math.exp((levels[1] - levels[0]) / 20 - 0.5))
    return {"A": better * 0.9, " b": (1 - better) * 0.9}


@pytest.mark.parametrize(("count", "against"), [(8, 2), (8, 4), (7, 6), (4, 16), (2, 2)])
def test_win_rates(vlm, opened, grey, count, against):
    vlm.chances = _prefers_brighter
    levels = [(index * 37) % 101 for index in range(count)]
    reward = opened(against=against)
    assert reward.samples_per_call is None
    scores = reward.score([grey(level) for level in levels])

    def wins(first: int, second: int) -> float:
        both = (_prefers_brighter("", [first, second]), _prefers_brighter("", [second, first]))
        return (both[0]["A"] / 0.9 + both[1][" b"] / 0.9) / 2

    for index, score in enumerate(scores):
        steps = range(1, count)
        if against < count - 1:
            steps = [*range(1, against // 2 + 1), *range(count - against // 2, count)]
        met = [wins(levels[index], levels[(index + step) % count]) for step in steps]
        assert score == pytest.approx(sum(met) / len(met))
    assert sum(scores) == pytest.approx(count / 2)  # each win is another one's loss
    # Each pair was asked about once in each order, and a repetition gives the same bits.
    asked = [tuple(row["levels"]) for row in vlm.questions]
    assert len(set(asked)) == len(asked) == count * min(against, count - 1)
    assert reward.score([grey(level) for level in levels]) == scores
    assert opened(against=against).score([grey(1)]) == [0.5]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "need one of them"),
        ({"judge": "fake", "url": "http://127.0.0.1:1"}, "need one of them"),
        ({"url": "127.0.0.1:8000"}, "no base URL of a server"),
        ({"judge": "j", "read": "ocr", "against": 2}, "read and against are 2 ways to a score"),
        ({"judge": "j", "answers": {"yes": 1, "no": 0}, "questions": "vqa"}, "are 2 ways"),
        ({"judge": "j", "answers": {True: 1, False: 0}}, "answers has the key True; write it in"),
        ({"judge": "j", "answers": {"yes": 1, "Yes": 0}}, "letters of its own"),
        ({"judge": "j", "answers": {"yes": 1, "no": 1}}, "at least 2 different finite values"),
        ({"judge": "j", "answers": {"yes": 1, "no": float("nan")}}, "different finite values"),
        ({"judge": "j", "answers": ["yes", "no"]}, "must be values by answer"),
        ({"judge": "j", "questions": True}, "must be the name of a column"),
        ({"judge": "j", "read": "text"}, "ocr is the only value"),
        ({"judge": "j", "pattern": "(x)"}, "needs the question"),
        ({"judge": "j", "pattern": "x", "question": "?"}, "0 groups"),
        ({"judge": "j", "pattern": "(", "question": "?"}, "no regular expression"),
        ({"judge": "j", "pattern": "(.)", "question": "?", "scale": [5, 1]}, "lowest, highest"),
        ({"judge": "j", "questions": "vqa", "question": "?"}, "which are the row's own"),
        ({"judge": "j", "questions": "vqa", "mean": "median"}, "arithmetic or geometric"),
        ({"judge": "j", "against": 3}, "against=3 must be even"),
        ({"url": "http://127.0.0.1:1", "token_env": "NO_SUCH_KEY"}, "no such variable; set it"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(args, text):
    with pytest.raises(ValueError, match=r"reward\.look\.args=.*refused by type=vlm") as error:
        build_reward("look", RewardConfig(type="vlm", args=args))
    assert text in str(error.value)


def test_what_a_server_cannot_do_is_said_when_it_is_opened(vlm, opened, grey):
    with pytest.raises(ValueError, match=r"names \{stile\}.*did you mean 'style'"):
        opened(question="{stile}?").validate([grey(0, style="oil").prompt])
    with pytest.raises(ValueError, match=r"judge=fakes is not in .*did you mean 'fake'"):
        opened(judge="fakes")
    with pytest.raises(ValueError, match=r"model='jugde'.* serves 1 models, judge"):
        opened(model="jugde")
    with pytest.raises(ValueError, match="also begin another of"):
        opened(answers={"red": 1, "redder": 0})
    vlm.models = ("judge", "policy")
    with pytest.raises(ValueError, match=r"model='': .* serves 2 models, judge, policy"):
        opened()
    assert opened(model="judge", url=f"{vlm.url}/v1").score([grey(0)]) == [1.0]
    vlm.fault = _says(400, "At most 0 image(s) may be provided in one prompt.")
    with pytest.raises(ValueError, match=r"no answer about 2 grey picture.*At most 0 image"):
        opened(model="judge", against=2)
    with pytest.raises(ScoreFailed, match="gave up after"):
        opened(url="http://127.0.0.1:9", deadline_s=0.2)


def _says(status: int, answer: object) -> Callable[[BaseHTTPRequestHandler], bool]:
    """Return a fault: the server says this to every question."""

    def fault(handler: BaseHTTPRequestHandler) -> bool:
        reply(handler, status, answer)
        return True

    return fault


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_says(400, "decoder prompt is longer than 2048"), "decoder prompt is longer"),
        (_says(200, {"choices": []}), "need a chat completion with logprobs, got"),
        (_says(200, {"choices": [{"logprobs": None}]}), "with logprobs, got"),
        (_says(200, ["yes"]), "with logprobs, got"),
        (_says(503, "loading"), "gave up after"),
    ],
)
def test_a_failure_is_never_a_score(vlm, opened, grey, fault, text):
    reward = opened(timeout_s=0.4, deadline_s=0.8)
    vlm.fault = fault
    with pytest.raises(ScoreFailed, match=text):
        reward.score([grey(0)])


@pytest.mark.parametrize(
    "choice",
    [
        {"finish_reason": "length", "message": {"content": None, "reasoning": "First I look"}},
        {"finish_reason": "length", "message": {"content": "STO"}},
        {"finish_reason": "stop", "message": {"content": None}},
    ],
)
def test_a_text_that_is_cut_off_is_no_reading(vlm, opened, grey, choice):
    """An empty text would score 0, and half of one too little."""
    reward = opened(read="ocr")
    vlm.fault = _says(200, {"choices": [choice]})
    with pytest.raises(ScoreFailed, match="raise max_tokens=1024"):
        reward.score([grey(0, text="STOP")])


def test_a_server_that_comes_back_costs_a_retry(vlm, opened, grey):
    reward = opened()
    faults = [_says(503, "loading")]
    vlm.fault = lambda handler: bool(faults) and faults.pop()(handler)
    assert reward.score([grey(0)]) == [1.0]
    assert reward.figures()["retries"] == 1.0
    assert reward.figures() == {"retries": 0.0}


def test_the_yaml_of_the_page(tmp_path):
    page = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
    files = {}
    for name in ("vlm", "vlm_ways", "judge"):
        (example,) = re.findall(rf"```yaml\n# {name}.yaml\n(.*?)```", page, re.DOTALL)
        files[name] = OmegaConf.create(example)
        for reward, values in files[name].reward.items():
            config = RewardConfig(**OmegaConf.to_container(values))
            # of a reward that asks much in a call, two at once
            assert build_reward(reward, config).workers == (2 if reward in ("tifa", "wins") else 32)
    (judge,) = files["judge"].judge.values()
    JudgeConfig(**judge)
    assert len(judge.gpus) == judge.tp * judge.replicas
    unified = build_reward("unified", RewardConfig(**files["vlm_ways"].reward.unified))
    text = "cup (object): 1\nFinal Score: 4"
    assert number_in(text, unified._pattern, unified.scale) == 0.8
    (axes,) = re.findall(r"their pattern is `(.*?)`", page, re.DOTALL)
    assert axes.replace("\n", " ") == UNIFIED_20


def test_the_images_of_the_row_come_before_the_picture(vlm, opened, grey, tmp_path):
    files = []
    for level, size in ((40, (64, 32)), (90, (8, 8))):
        files.append(str(tmp_path / f"{level}.png"))
        Image.new("RGB", size, (level,) * 3).save(files[-1])
    sample = grey(7, "make it red")
    sample = replace(sample, prompt=replace(sample.prompt, images=tuple(files)))

    reward = opened(images=True)
    assert reward.score([sample]) == [1.0]
    (asked,) = vlm.questions
    assert (
        asked["levels"] == [40, 90, 7] and 'by the instruction "make it red"' in asked["question"]
    )
    # no larger than the sample, and not enlarged
    sizes = [_size(given_url(file, 16)) for file in files]
    assert sizes == [(16, 8), (8, 8)]

    wins = opened(images=True, against=2, question="The first is before. A or B?")
    other = replace(sample, pixels=np.full_like(sample.pixels, 9))
    wins.score([sample, other])
    assert [asked["levels"] for asked in vlm.questions] in (
        [[40, 90, 7, 9], [40, 90, 9, 7]],
        [[40, 90, 9, 7], [40, 90, 7, 9]],
    )
    with pytest.raises(ValueError, match="images=true, and the row .* has 0 images"):
        reward.validate([grey(7).prompt])
    with pytest.raises(ValueError, match="images=true with against has no question"):
        opened(images=True, against=2)


def _size(url: str) -> tuple[int, int]:
    data = base64.b64decode(url.partition(",")[2])
    return Image.open(io.BytesIO(data)).size
