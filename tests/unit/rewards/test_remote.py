"""Remote rewards: what a server may do wrong, and what a run does then."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megadiff.config.load import load_rewards
from megadiff.config.rewards import RewardConfig
from megadiff.rewards.answers import WrongAnswer, score_checked
from megadiff.rewards.base import (
    RewardContext,
    RewardError,
    ScoreFailed,
    build_reward,
    build_rewards,
)
from megadiff.rewards.remote import RemoteReward
from megadiff.rewards.score import Scorer
from tests.unit.process.strangers import Stranger, reply
from tests.unit.rewards.far_reward import remote
from tests.unit.rewards.fault_server import fault_server
from tests.unit.rewards.test_http_pool import free_port

pytestmark = pytest.mark.slow  # most of it waits for servers that do not answer

ROOT = Path(__file__).parents[3]
CONTEXT = RewardContext(device=torch.device("cpu"))


@pytest.mark.parametrize("fault", ["", "half"])
def test_faults_that_pass_change_no_score(samples, fault):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fault_server(fault, times=1))
        reward = stack.enter_context(contextlib.closing(remote(server.url)))
        reward.open(CONTEXT)
        expected = [sample.pixels.mean() / 255 for sample in samples]
        assert score_checked(reward, samples) == expected
        # as open() asked once, and nobody else
        assert reward.figures() == {"retries": len(server.asked) - 2.0}
        assert (len(server.asked) > 2) == bool(fault)
        assert reward.figures() == {"retries": 0.0}


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("hang", ScoreFailed, r"gave up after \d tries \(deadline_s=1\.5, .*no whole answer"),
        ("short", WrongAnswer, "returned 3 values for 4 samples"),
        ("nan", WrongAnswer, "sample 0 .*returned nan"),
    ],
)
def test_faults_that_stay_are_never_a_score(samples, fault, error, text):
    call = score_checked if error is WrongAnswer else RemoteReward.score
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fault_server(fault))
        far = remote(server.url, timeout_s=0.4, deadline_s=1.5)
        reward = stack.enter_context(contextlib.closing(far))
        reward.open(CONTEXT)
        start_s = time.monotonic()
        with pytest.raises(error, match=text):
            call(reward, samples)
        assert time.monotonic() - start_s < 10


def test_the_scorer_leaves_a_failed_sample_out_or_stops(make_group, caplog):
    """null is such a sample. Through the scorer, as a run does."""
    group = make_group(list(range(0, 200, 10)))
    with fault_server("null") as server:
        args = {"url": server.url, "samples_per_call": 8}
        for on_failure in ("drop", "stop"):
            config = RewardConfig(type="remote", args=args, on_failure=on_failure)
            with contextlib.closing(Scorer({"far": config})) as scorer:
                if on_failure == "stop":
                    with pytest.raises(RewardError, match="reward 'far' could not score sample"):
                        scorer.score([group])
                    continue
                scores = scorer.score([group])["far"][0]
                assert scorer.pop_figures()["far"]["dropped"] == 3  # a call is 8 samples
    assert scores.isnan().nonzero().flatten().tolist() == [0, 8, 16]
    assert scores[1] == pytest.approx(10 / 255)
    assert "the server could not score 1 of 8 samples" in caplog.text


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(200, b'{"ready": false}', "'ready': False"), (404, b"", "answered 404"), (200, b"5", "5")],
)
def test_what_is_no_scorer_is_refused_at_the_start(status, body, said):
    with Stranger(lambda handler, _: reply(handler, body, status=status)) as stranger:
        with contextlib.closing(remote(stranger.url)) as reward:
            with pytest.raises(ValueError, match=rf"{stranger.url} is no scorer: .*{said}"):
                reward.open(CONTEXT)


def test_an_answer_without_scores_is_an_error(samples):
    with Stranger(lambda handler, _: reply(handler, b'{"score": [1]}')) as stranger:
        with contextlib.closing(remote(stranger.url)) as reward:
            with pytest.raises(WrongAnswer, match=r"answered .*'score'.*must be .*4 numbers"):
                score_checked(reward, samples)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"url": "gpu7:9000"}, "url 'gpu7:9000' is no base URL of a server"),
        ({"url": []}, "url has 0 servers"),
        ({"url": "http://a", "workers": 0}, "workers=0, must be at least 1"),
        ({"url": "http://a", "token_env": "NO_SUCH_TOKEN"}, "token_env=NO_SUCH_TOKEN, but the env"),
        ({"url": "http://a", "token_env": "BAD_TOKEN"}, "the token of BAD_TOKEN has characters"),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(monkeypatch, arguments, text):
    monkeypatch.setenv("BAD_TOKEN", "a\nb")
    with pytest.raises(ValueError, match=re.escape(text)):
        build_reward("far", RewardConfig(type="remote", args=arguments))


# The page


def test_the_yaml_of_the_page(tmp_path):
    page = (ROOT / "docs/rewards.md").read_text()
    config = re.search(r"```yaml\n(reward:\n  hps:\n    type: remote\n.*?)```", page, re.DOTALL)
    (tmp_path / "config.yaml").write_text(config.group(1))
    rewards = build_rewards(load_rewards([str(tmp_path / "config.yaml")]))
    assert isinstance(rewards["hps"], RemoteReward)


def test_the_server_of_the_page(tmp_path, samples):
    page = (ROOT / "docs/rewards.md").read_text()
    program = re.search(r"```python\n(# score_server\.py\n.*?)```", page, re.DOTALL).group(1)
    ast.parse(program, feature_version=(3, 8))
    (tmp_path / "score_server.py").write_text(program)

    port = free_port()
    # -I: it must not find megadiff
    process = subprocess.Popen([sys.executable, "-I", "score_server.py", str(port)], cwd=tmp_path)
    try:
        url = f"http://127.0.0.1:{port}"
        with contextlib.closing(remote(url)) as far:
            far.open(CONTEXT)
            assert far.score(samples) == [sample.pixels.mean() / 255 for sample in samples]
    finally:
        process.kill()
        process.wait()
