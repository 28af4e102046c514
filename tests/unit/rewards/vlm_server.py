"""Serve a vision-language model that answers as a test says, by vLLM's OpenAI API."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
from PIL import Image

from tests.unit.process import strangers
from tests.unit.process.strangers import Stranger

# Digits are split off a space in front of them, as Qwen's tokenizer does.
VOCABULARY = (
    "<unk>", " ", "Yes", "yes", " Yes", " yes", "No", "no", " No", " no", "A", "a", " A", " a",
    "B", "b", " B", " b", "1", "2", "3", "4", "5", "three", "Three", " three", " Three", "red",
    "Red", " red", " Red",
)  # fmt: skip
OTHERS = [f"other{index}" for index in range(30)]  # what a real model thinks of as well


@dataclass
class FakeVlm:
    """What the server does, and what it was asked.

    chances: (question, grey level of each picture) → first token's text → probability.
    text: what it writes. knows_ids: whether chosen tokens' log_probs are told. tokenizes: whether
    there is /tokenize. fault: called with the handler before an answer; True if it answered.
    """

    chances: Callable[[str, list[int]], dict[str, float]] = lambda question, levels: {"yes": 1.0}
    text: str = ""
    models: tuple[str, ...] = ("judge",)
    knows_ids: bool = True
    tokenizes: bool = True
    fault: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
    questions: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[FakeVlm]:
        with Stranger(self._respond) as server:
            self.url = server.url
            yield self

    def _respond(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.path == "/v1/chat/completions" and self.fault(handler):
            return
        if handler.path == "/tokenize" and not self.tokenizes:
            return reply(handler, 404, {"detail": "Not Found"})
        reply(handler, 200, self.answer(handler.path, json.loads(body or "{}")))

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.models]}
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            return {"tokens": [_first_token(body["prompt"])]}
        assert path == "/v1/chat/completions" and body["temperature"] == 0
        *pictures, text = body["messages"][0]["content"]
        question = text["text"]
        levels = [_grey_level(picture["image_url"]["url"]) for picture in pictures]
        self.questions.append({"question": question, "levels": levels})
        choice: dict[str, Any] = {"message": {"content": self.text}}
        if body.get("logprobs"):
            chances = self.chances(question, levels)
            choice["logprobs"] = {"content": [{"top_logprobs": self._rows(chances, body)}]}
        return {"choices": [choice]}

    def _rows(self, chances: dict[str, float], body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what vLLM tells: chosen ids with the sampled token, or the likeliest."""
        rest = (1.0 - sum(chances.values())) / len(OTHERS)
        every = {**dict.fromkeys(OTHERS, rest), **chances}
        told = sorted(every, key=every.__getitem__, reverse=True)[: body["top_logprobs"]]
        if self.knows_ids and body.get("logprob_token_ids"):
            told = told[:1] + [VOCABULARY[token] for token in body["logprob_token_ids"]]
        rows = []
        for form in dict.fromkeys(told):
            name = f"token_id:{VOCABULARY.index(form)}" if form in VOCABULARY else form
            chance = every.get(form, 0.0)
            log_prob = math.log(chance) if chance else -9999.0  # vLLM's for minus infinity
            rows.append({"token": name if self.tokenizes else form, "logprob": log_prob})
        return rows


def _first_token(text: str) -> int:
    starts = [token for token in VOCABULARY if text.startswith(token)]
    return VOCABULARY.index(max(starts, key=len, default="<unk>"))


def _grey_level(url: str) -> int:
    kind, _, data = url.partition(";base64,")
    assert kind == "data:image/webp"
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    assert pixels.min() == pixels.max()
    return int(pixels[0, 0, 0])


def reply(handler: BaseHTTPRequestHandler, status: int, answer: object) -> None:
    """Send an answer as JSON."""
    strangers.reply(handler, json.dumps(answer).encode(), status=status)
