"""Talk to a vision-language model behind an OpenAI-compatible server. Tested with vLLM 0.28."""

from __future__ import annotations

import base64
import io
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megadiff.data.pixels import decode
from megadiff.process.doors import near
from megadiff.rewards.base import ScoreFailed
from megadiff.rewards.http_pool import HttpPool
from megadiff.rewards.vlm_answers import AnswerTokens, answer_tokens

logger = logging.getLogger(__name__)
NUM_LIKELIEST = 20  # vLLM's most for top_logprobs
GREY = np.full((64, 64, 3), 128, dtype=np.uint8)


class VlmClient:
    """Ask one model on equal servers. For any number of threads.

    pool: of the servers. model: as they call it, "" for their only one.
    Raises ValueError for a server that does not serve it, and ScoreFailed.
    """

    def __init__(self, pool: HttpPool, model: str) -> None:
        self.pool = pool
        self.model = model
        for url in pool.urls:
            self.model = self._served_model(url)
        # A text → its first token's id. Two threads may write one entry, the same value.
        self._ids: dict[str, int] = {}
        self._first_token: Callable[[str], int] | None = self._token_of
        try:
            self._token_of(" ")
        except ScoreFailed as error:
            logger.info("answers are matched as texts, as the server has no /tokenize: %s", error)
            self._first_token = None
        self._exact = False

    def tokens(self, values: Mapping[str, float]) -> AnswerTokens:
        """Return the tokens of answers. Raises ValueError as answer_tokens() does."""
        return answer_tokens(values, self._first_token)

    def try_out(self, num_pictures: int, tokens: AnswerTokens | None) -> None:
        """Ask about grey pictures; with tokens see whether the server tells exactly those.

        Raises ValueError for a model that does not take the pictures.
        """
        pictures = [picture_url(GREY)] * num_pictures
        try:
            if tokens is None:
                self._chat(pictures, "Is this grey?", max_tokens=1)
                return
            log_probs = self.log_probs(pictures, "Is this grey?", tokens)
        except ScoreFailed as error:
            raise ValueError(
                f"the model {self.model!r} gave no answer about {num_pictures} grey picture(s); "
                f"serve a vision-language model that takes as many at once: {error}"
            ) from error
        # vLLM ignores fields that it does not know, so the answer alone tells.
        self._exact = bool(tokens.ids) and not _missing(tokens, log_probs)
        if not self._exact:
            logger.warning(
                "the server of %s does not tell the log_probs of chosen tokens: answers that are "
                "not among the %d likeliest tokens count as impossible",
                self.model,
                NUM_LIKELIEST,
            )

    def log_probs(
        self, pictures: Sequence[str], question: str, tokens: AnswerTokens
    ) -> dict[str, float]:
        """Return name → log_prob of the answer's first token, for `tokens` at least.

        Raises ScoreFailed.
        """
        answer = self._chat(
            pictures,
            question,
            max_tokens=1,
            logprobs=True,
            top_logprobs=NUM_LIKELIEST,
            # These alone, where the server knows the field.
            logprob_token_ids=list(tokens.ids) or None,
            return_tokens_as_token_ids=True,
        )
        with _read_as("a chat completion with logprobs", answer):
            rows = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            log_probs = {row["token"]: float(row["logprob"]) for row in rows}
        missing = _missing(tokens, log_probs)
        if self._exact and missing:
            raise ScoreFailed(
                f"asked for the log_probs of {len(tokens.ids)} tokens, {len(missing)} are not in "
                f"the answer: {missing}"
            )
        return log_probs

    def text(self, pictures: Sequence[str], question: str, *, max_tokens: int) -> str:
        """Return what the model writes. Raises ScoreFailed, also for a text that was cut off."""
        answer = self._chat(pictures, question, max_tokens=max_tokens)
        with _read_as("a chat completion", answer):
            choice = answer["choices"][0]
            content = choice["message"]["content"]
        # A thinking model that used up its tokens has written nothing, which is no empty picture.
        if not isinstance(content, str) or choice.get("finish_reason") == "length":
            raise ScoreFailed(
                f"the answer {reprlib.repr(content)} ended by {choice.get('finish_reason')!r}; "
                f"raise max_tokens={max_tokens}, or serve a model that answers at once"
            )
        return content

    def _chat(self, pictures: Sequence[str], question: str, **options: object) -> Any:
        images = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        content = [*images, {"type": "text", "text": question}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            **options,
        }
        return self.pool.post("/v1/chat/completions", json=body)

    def _token_of(self, text: str) -> int:
        if text not in self._ids:
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            answer = self.pool.post("/tokenize", json=body)
            with _read_as("the tokens of /tokenize", answer):
                self._ids[text] = int(answer["tokens"][0])
        return self._ids[text]

    def _served_model(self, url: str) -> str:
        """Return the model to ask for. Raises ValueError where the server does not serve it."""
        answer = self.pool.get("/v1/models", url=url)
        with _read_as(f"the models of an OpenAI-compatible server at {url}, e.g. vLLM's", answer):
            names = [str(row["id"]) for row in answer["data"]]
        if not self.model and len(names) == 1:
            return names[0]
        if self.model not in names:
            raise ValueError(
                f"model={self.model!r}: {url} serves {len(names)} models, "
                f"{', '.join(names) or 'none'}{near(self.model, names)}; set model to one of them"
            )
        return self.model


def picture_url(pixels: np.ndarray) -> str:
    """Return a picture [H, W, 3] uint8 as a data URL; every pixel is exact."""
    buffer = io.BytesIO()
    # Method 0 takes a seventh of PNG's time.
    Image.fromarray(pixels).save(buffer, "WEBP", lossless=True, quality=0, method=0)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


# Every sample of a group asks for the same image; more than a step's prompts need not be here.
@lru_cache(maxsize=128)
def given_url(file: str, longest: int) -> str:
    """Return an image of the data as picture_url() does, its sides at most `longest` pixels."""
    image = Image.fromarray(decode(Path(file).read_bytes(), where=file))
    image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    return picture_url(np.asarray(image))


@contextmanager
def _read_as(wanted: str, answer: object) -> Iterator[None]:
    """Raise ScoreFailed where the block does not find what it reads in a server's answer."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError):
        raise ScoreFailed(f"need {wanted}, got {reprlib.repr(answer)}") from None


def _missing(tokens: AnswerTokens, log_probs: Mapping[str, float]) -> list[int]:
    return [token for token in tokens.ids if f"token_id:{token}" not in log_probs]
