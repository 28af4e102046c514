"""Remote rewards: exact pixels, faults that end as documented, and servers that trust nobody."""

from __future__ import annotations

import ast
import contextlib
import datetime
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.cli import score as command
from megadiff.config.load import load_rewards
from megadiff.config.rewards import RewardConfig
from megadiff.rewards import server as score_server
from megadiff.rewards.answers import WrongAnswer, score_checked
from megadiff.rewards.base import (
    Reward,
    RewardContext,
    RewardError,
    ScoreFailed,
    build_reward,
    build_rewards,
)
from megadiff.rewards.remote import TOKEN_VARIABLE, RemoteReward, samples_to_npz
from megadiff.rewards.score import Scorer
from megadiff.rewards.server import ScoreServer
from tests.unit.process.strangers import Stranger, reply
from tests.unit.rewards.byte_reward import ByteReward
from tests.unit.rewards.fault_server import fault_server
from tests.unit.rewards.test_http_pool import free_port

pytestmark = pytest.mark.slow  # most of it waits for servers that do not answer

ROOT = Path(__file__).parents[3]
CONTEXT = RewardContext(device=torch.device("cpu"))
TOKEN = "0123456789abcdef-score"
CONFIG = """
reward:
  bytes: {type: "tests.unit.rewards.byte_reward:ByteReward", args: {refused: "a black hole"}}
"""


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def samples(make_sample, tmp_path):
    """4 videos of noise for one prompt, with two images and columns as a parquet file has them."""
    generator = np.random.default_rng(0)
    columns = {"day": datetime.date(2026, 11, 24), "share": float("nan"), "tags": ["é", None]}
    files = [tmp_path / "first.png", tmp_path / "ünïcode"]
    for file in files:
        file.write_bytes(generator.bytes(100))

    def make(index):
        pixels = generator.integers(0, 256, (2, 5, 7, 3), np.uint8)
        sample = make_sample(pixels, "a “red” 円\0", **columns)
        prompt = replace(sample.prompt, negative_text="ugly", images=tuple(map(str, files)))
        return replace(sample, prompt=prompt, sample_index=index)

    return [make(index) for index in range(4)]


def remote(url, **arguments) -> RemoteReward:
    limits = {"timeout_s": 20.0, "deadline_s": 20.0, **arguments}
    return build_reward("far", RewardConfig(type="remote", args={"url": url, **limits}))


@contextlib.contextmanager
def serving(reward):
    with ScoreServer(reward, host="127.0.0.1", port=0, token="") as server:
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# The faults of a server


@pytest.mark.parametrize("fault", ["", "slow", "500", "half", "hang", "drip", "html"])
def test_faults_that_pass_change_no_score(samples, fault):
    timeout_s = 0.5 if fault in ("hang", "drip") else 10.0
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fault_server(fault, times=1))
        reward = stack.enter_context(contextlib.closing(remote(server.url, timeout_s=timeout_s)))
        reward.open(CONTEXT)
        expected = [sample.pixels.mean() / 255 for sample in samples]
        assert score_checked(reward, samples) == expected
        # as open() asked once, and nobody else
        assert reward.figures() == {"retries": len(server.asked) - 2.0}
        assert (len(server.asked) > 2) == (fault not in ("", "slow"))
        assert reward.figures() == {"retries": 0.0}


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("500", ScoreFailed, r"gave up after \d tries \(deadline_s=1\.5, .*/score answered 500"),
        ("hang", ScoreFailed, r"gave up after \d tries \(deadline_s=1\.5, .*no whole answer"),
        ("422", ScoreFailed, r"POST http://\S+/score answered 422.*because of the fault"),
        ("redirect", ScoreFailed, "redirects are not followed.*http://127.0.0.1:1/elsewhere"),
        ("short", WrongAnswer, "returned 3 values for 4 samples"),
        ("nan", WrongAnswer, "sample 0 .*returned nan"),
    ],
)
def test_faults_that_stay_are_never_a_score(samples, fault, error, text):
    call = score_checked if error is WrongAnswer else RemoteReward.score
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fault_server(fault))
        far = remote(server.url, timeout_s=0.4 if fault == "hang" else 1.2, deadline_s=1.5)
        reward = stack.enter_context(contextlib.closing(far))
        reward.open(CONTEXT)
        start_s = time.monotonic()
        with pytest.raises(error, match=text):
            call(reward, samples)
        assert time.monotonic() - start_s < 2.5


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


@pytest.mark.parametrize("fault", ["hang", "dead"])
def test_one_of_two_servers_fails(samples, fault):
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(fault_server())
        bad = f"http://127.0.0.1:{free_port()}"
        if fault != "dead":
            bad = stack.enter_context(fault_server(fault)).url
        reward = stack.enter_context(contextlib.closing(remote([bad, good.url], timeout_s=0.5)))
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: reward.score(samples), range(16)))
    assert answers == [[sample.pixels.mean() / 255 for sample in samples]] * 16


def test_a_server_may_start_late(samples):
    port = free_port()
    with contextlib.closing(remote(f"http://127.0.0.1:{port}")) as reward:
        with ThreadPoolExecutor(1) as thread:
            opened = thread.submit(reward.open, CONTEXT)
            time.sleep(0.4)
            with fault_server(port=port):
                opened.result()
                assert len(reward.score(samples)) == 4


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


# A server of ours, in this process


class Busy(Reward):
    """Count the calls that run at once."""

    workers = 2
    samples_per_call = 1

    def __init__(self):
        self.lock = threading.Lock()
        self.now = 0
        self.most = 0
        self.calls = 0

    def score(self, samples):
        with self.lock:
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self.lock:
            self.now -= 1
        return [0.5]


def test_as_many_calls_run_at_once_as_the_reward_has_workers(samples):
    busy = Busy()
    with serving(busy) as url, contextlib.closing(remote(url)) as far:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: far.score(samples[:2]), range(8)))
    assert answers == [[0.5, 0.5]] * 8
    assert busy.most == 2
    assert busy.calls == 16


class Shifts(Reward):
    """Answer 3 values and then 1 for calls of 2, or texts."""

    samples_per_call = 2

    def __init__(self, *answers):
        self.answers = list(answers)

    def score(self, samples):
        return self.answers.pop(0)


@pytest.mark.parametrize("answers", [([1, 2, 3], [9]), (["0.5", "0.7"],), ([1.0, float("nan")],)])
def test_answers_are_checked_where_they_are_made(samples, answers):
    """A chunk that is too long and one that is too short would be as many as were asked for."""
    with serving(Shifts(*answers)) as url, contextlib.closing(remote(url)) as far:
        with pytest.raises(ScoreFailed, match="answered 422.*returned"):
            far.score(samples[:4])


def test_who_has_left_is_not_scored(samples):
    """A server that is behind does not spend its time on requests that are asked again."""
    busy = Busy()
    with serving(busy) as url:
        impatient = remote(url, timeout_s=0.12, deadline_s=0.12)
        with contextlib.closing(impatient), ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(impatient.score, samples) for _ in range(8)]
        assert all(isinstance(call.exception(), ScoreFailed) for call in calls)
    assert busy.calls < 8 * 4 / 2


def test_a_reward_that_hangs_does_not_hang_the_others(samples, monkeypatch):
    monkeypatch.setattr(score_server, "QUEUE_S", 0.1)
    over = threading.Event()

    class Hangs(Reward):
        workers = 1

        def score(self, samples):
            over.wait()
            return [0.5] * len(samples)

    with serving(Hangs()) as url, contextlib.closing(remote(url, deadline_s=20)) as patient:
        impatient = remote(url, timeout_s=1, deadline_s=1)
        with contextlib.closing(impatient), ThreadPoolExecutor(4) as threads:
            first = threads.submit(patient.score, samples)
            time.sleep(0.1)
            others = [threads.submit(impatient.score, samples) for _ in range(3)]
            for other in others:
                assert "no turn within 0.1 s: the reward may hang" in str(other.exception())
            over.set()
            assert first.result() == [0.5] * 4


def test_what_a_reward_raises(samples):
    """A failed sample is null, ValueError is the request's fault, anything else may pass."""
    errors = [ScoreFailed("it is asleep"), MemoryError("full"), ValueError("no such language")]

    class Raises(Reward):
        def score(self, samples):
            if errors:
                raise errors.pop(0)
            return torch.full((len(samples),), 0.25)

    with serving(Raises()) as url, contextlib.closing(remote(url)) as far:
        assert far.score(samples) == [None] * 4
        with pytest.raises(ScoreFailed, match="answered 422.*no such language"):
            far.score(samples)
        assert far.figures() == {"retries": 1.0}
        assert far.score(samples) == [0.25] * 4


def test_a_prompt_that_the_reward_refuses_is_refused_before_it_is_scored(samples):
    """At the client another reward stands, which refuses nothing."""
    busy = Busy()

    def validate(prompts):
        raise ValueError(f"{len(prompts)} prompts without a quoted text")

    busy.validate = validate
    with serving(busy) as url, contextlib.closing(remote(url)) as far:
        with pytest.raises(ScoreFailed, match="answered 422.*1 prompts without a quoted text"):
            far.score(samples)
    assert not busy.calls


def test_a_frame_that_a_server_within_the_server_gave_up_is_a_failed_sample(samples):
    """Reward frame hands on what the other one raised; asking again would be useless."""
    frame = build_reward("frame", RewardConfig(type="frame", args={"reward": "color"}))

    def asleep(samples):
        raise ScoreFailed("it is asleep")

    frame.inner.score = asleep
    with serving(frame) as url, contextlib.closing(remote(url)) as far:
        assert far.score(samples) == [None] * 4
        assert far.figures() == {"retries": 0.0}


def test_a_request_that_is_too_large_is_refused(samples, monkeypatch):
    monkeypatch.setattr(score_server, "MAX_BYTES", 1000)
    big = [replace(samples[0], pixels=np.zeros((1, 1024, 2048, 3), np.uint8))]
    with serving(ByteReward()) as url:
        with contextlib.closing(remote(url)) as far:
            with pytest.raises(ScoreFailed, match="413: .*at most 1000 are taken; send fewer samp"):
                far.score(big)


# A server of ours, as a process


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A real `megadiff score`, with a token: (its url, the process)."""
    folder = tmp_path_factory.mktemp("score")
    (folder / "config.yaml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(ROOT), TOKEN_VARIABLE: TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "megadiff.cli.main", "score", "config.yaml", "--port", "0"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("w"),
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert "reward 'bytes' is served at http://127.0.0.1:" in line, (folder / "log").read_text()
        yield line.split()[-1], process
    finally:
        process.kill()
        process.wait()


def post(url: str, body: bytes, *, token: str = TOKEN) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url}/score", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def npz(**arrays) -> bytes:
    body = io.BytesIO()
    np.savez(body, **arrays)
    return body.getvalue()


def test_a_served_reward_sees_every_byte(served, samples, monkeypatch):
    url, _ = served
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    with contextlib.closing(remote(url, token_env="MY_TOKEN")) as far:
        far.open(CONTEXT)
        scores = far.score(samples)
        refused = replace(samples[0], prompt=replace(samples[0].prompt, text="a black hole"))
        with pytest.raises(ScoreFailed, match="422: .*'a black hole' cannot be scored"):
            far.score([refused])

    near = ByteReward()
    near.open(CONTEXT)
    # What JSON cannot hold arrives as text.
    fields = {"day": "2026-11-24", "share": "NaN", "tags": ["é", None]}
    prompt = replace(samples[0].prompt, fields=fields)
    arrived = [replace(sample, prompt=prompt) for sample in samples]
    assert scores == near.score(arrived[:3]) + near.score(arrived[3:])
    assert len(set(scores)) == 4


@pytest.mark.parametrize(
    ("token", "text"), [("", "brings no token"), ("another-token-by-16", "another token than this")]
)
def test_only_the_token_opens_it(served, samples, monkeypatch, token, text):
    url, _ = served
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with contextlib.closing(remote(url)) as far:
        with pytest.raises(ValueError, match=f"is no scorer: .*401: .*{text}"):
            far.open(CONTEXT)
        with pytest.raises(ScoreFailed, match=f"401: .*{text}"):
            far.score(samples)
        assert far.figures() == {"retries": 0.0}


class Program:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_bad_bodies_are_refused_with_the_reason(served, samples, tmp_path):
    url, _ = served
    whole = samples_to_npz(samples)
    program = Program(tmp_path / "it_ran")
    pixels = np.zeros((1, 1, 4, 4, 3), np.uint8)
    row = {"prompt": "a", "negative_prompt": "", "id": "0", "fields": {}, "index": 0, "images": []}

    def rows(*values):
        return np.frombuffer(json.dumps(values).encode(), np.uint8)

    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("pixels.npy", "w", force_zip64=True) as stream:
            for _ in range(33):
                stream.write(bytes(2**20))
    # its directory claims as much as such a bomb would hold
    size = (33 * 2**20).to_bytes(4, "little")
    claimed = bomb.getvalue().replace(size, (2**32 - 2**20).to_bytes(4, "little"))

    bodies = {
        "File is not a zip file": [b"", b"abc", whole[:-40], pickle.dumps(program)],
        "allow_pickle=False": [
            npz(pixels=np.array([program], object), samples=rows(row)),
            npz(pixels=pixels, samples=np.array([program], object)),
        ],
        "Bad CRC-32": [whole.replace(samples[0].pixels.tobytes(), bytes(210))],
        "pixels is not a file in the archive": [npz(samples=rows(row))],
        "it unpacks to 42": [claimed],
        r"pixels are float32 \[1, 1, 4, 4, 3\], must be uint8": [
            npz(pixels=pixels.astype(np.float32), samples=rows(row))
        ],
        r"pixels are uint8 \[1, 4, 4, 3\]": [npz(pixels=pixels[0], samples=rows(row))],
        "samples has 2 for pixels of 1": [npz(pixels=pixels, samples=rows(row, row))],
        "JSONDecodeError": [npz(pixels=pixels, samples=np.frombuffer(b"{", np.uint8))],
        r"images of a row are \[1\], must be .* of which the body has 1": [
            npz(pixels=pixels, samples=rows({**row, "images": [1]}), image_0=np.zeros(1, np.uint8))
        ],
        "a row of samples is .*'x'.* must be an object": [npz(pixels=pixels, samples=rows("x"))],
        "a row of samples is .* must be": [npz(pixels=pixels, samples=rows({**row, "id": 5}))],
    }
    for reason, group in bodies.items():
        for body in group:
            status, answer = post(url, body)
            assert status == 422, (reason, answer)
            assert re.search(reason, answer["error"]), answer
    assert not program.folder.exists()
    status, answer = post(url, whole)
    assert status == 200 and len(answer["scores"]) == 4


def test_sigterm_ends_it(served):
    """The last test with this server."""
    url, process = served
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    with pytest.raises(urllib.error.URLError, match="refused"):
        post(url, b"")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], f"0.0.0.0 is not on loopback, and {TOKEN_VARIABLE} is not set"),
        (["reward.two.type=jpeg_size"], "--reward is not given: choose 1 of the 2 rewards in "),
        (["--reward", "pick"], "--reward pick: choose 1 of the 1 rewards in "),
        (
            ["reward.two.type=jpeg_size"],
            "config.yaml reward.two.type=jpeg_size: bytes, two",
        ),
        (["reward.two.weight=1"], "missing reward.two.type"),
        (["reward.bytes.args.refused=1", "rewards=1"], "unknown key rewards; did you mean reward"),
    ],
)
def test_settings_that_cannot_work(tmp_path, capsys, arguments, text):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    assert command.main([str(config), "--port", "0", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_an_address_that_is_taken(tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    with fault_server() as other:
        port = other.url.rpartition(":")[2]
        assert command.main([str(config), "--port", port]) == 2
    assert "Address already in use" in capsys.readouterr().err


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
