"""`megadiff score` as a process: exact pixels, and a server that trusts nobody."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.cli import score as command
from megadiff.rewards.base import RewardContext, ScoreFailed
from megadiff.rewards.remote import TOKEN_VARIABLE, samples_to_npz
from tests.unit.rewards.byte_reward import ByteReward
from tests.unit.rewards.far_reward import remote
from tests.unit.rewards.fault_server import fault_server

ROOT = Path(__file__).parents[3]
CONTEXT = RewardContext(device=torch.device("cpu"))
TOKEN = "0123456789abcdef-score"
CONFIG = """
reward:
  bytes: {type: "tests.unit.rewards.byte_reward:ByteReward", args: {refused: "a black hole"}}
"""


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
        (["--port", "70000"], "--port 70000 must be from 0, for any free one, to 65535"),
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
