"""Reward vlm: score what a vision-language model answers about a picture."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megadiff.process.doors import near
from megadiff.rewards.base import Reward, RewardContext, RewardSample
from megadiff.rewards.http_pool import bearer_header, check_urls
from megadiff.rewards.ocr import text_score, wanted_text
from megadiff.rewards.vlm_answers import (
    AnswerTokens,
    check_answers,
    check_pattern,
    columns_of,
    fill,
    named_columns,
    number_in,
    opponents,
    question_rows,
    wanted_answers,
    without_special_tokens,
)
from megadiff.rewards.vlm_client import VlmClient, picture_url
from megadiff.types import Prompt

logger = logging.getLogger(__name__)
YES_NO = {"yes": 1.0, "no": 0.0}
FIRST_OR_SECOND = {"A": 1.0, "B": 0.0}
ONE_WORD = "{} Answer in one word."  # GenEval 2
QUESTIONS = {  # way of asking → its default question
    "answers": 'Does this image show "{prompt}"? Please answer yes or no.',
    "read": "Please output only the text content from the image without any additional "
    "descriptions or formatting.",
    "against": 'The first image is A, the second is B. Which of them shows "{prompt}" better? '
    "Please answer A or B.",
}
MIN_MASS = 0.5  # below it the model would mostly say something else


class VlmReward(Reward):
    """Ask a vision-language model about each picture, of a video about its middle frame.

    judge: a server of the config's section `judge`, or url: one's own, base URL or several equal
    ones. model: as the server calls it, "" for its only one. question: {prompt} and the names of
    the row's other columns in braces are filled in.

    One of five ways to a score:
    answers: answer → value; the expectation over the first token's probabilities of all answers.
    read: ocr has the model write out the text, which is scored as the reward `ocr` does.
    pattern, scale: a regular expression whose groups are numbers; their mean, as 0 … 1 of scale.
    questions: the column of rows [question, answer]; the mean of the answers' probabilities,
    arithmetic or geometric (GenEval 2's Soft-TIFA).
    against: each sample meets so many others of its group, in both orders; its rate of wins.

    max_tokens: of an answer in text. timeout_s, deadline_s: of a request, and with its retries.
    token_env: the environment variable with the key of one's own servers.
    """

    workers = 32

    def __init__(
        self,
        *,
        judge: str = "",
        url: str | Sequence[str] = (),
        model: str = "",
        question: str = "",
        answers: Mapping[str, float] | None = None,
        read: str = "",
        pattern: str = "",
        scale: Sequence[float] = (1, 5),
        questions: str = "",
        mean: str = "arithmetic",
        against: int = 0,
        max_tokens: int = 1024,
        timeout_s: float = 60.0,
        deadline_s: float = 240.0,
        token_env: str = "",
    ) -> None:
        if bool(judge) == bool(url):
            raise ValueError(
                f"judge={judge!r} and url={url!r}: need one of them; judge names a server of the "
                "config's section `judge`, url is a server of your own, as http://host:port"
            )
        ways = {"answers": answers is not None, "read": read, "pattern": pattern}
        self._way = _only_one(ways | {"questions": questions, "against": against})
        if read not in ("", "ocr"):
            raise ValueError(f"read={read!r}; ocr is the only value")
        if mean not in ("arithmetic", "geometric"):
            raise ValueError(f"mean={mean!r}; give arithmetic or geometric")
        _check_question(question, self._way)
        _check_against(against)

        self._judge = judge
        # Other clients are given the URL with it.
        self._urls = [row.removesuffix("/v1") for row in check_urls(url)] if url else []
        self._model = model
        self._question = question or QUESTIONS.get(self._way, "")
        self._values = check_answers(FIRST_OR_SECOND if against else answers or YES_NO)
        self._pattern = check_pattern(pattern, scale) if pattern else None
        self._scale = (float(scale[0]), float(scale[-1]))
        self._questions = questions
        self._mean = mean
        self._against = against
        self._max_tokens = max_tokens
        self._timeout_s = min(timeout_s, deadline_s)
        self._deadline_s = deadline_s
        self._headers = bearer_header(token_env, is_needed=True) if token_env else {}
        self.samples_per_call = None if against else 1

        self._client: VlmClient | None = None
        self._tokens: AnswerTokens | None = None
        # For the questions inside one call.
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="vlm")
        self._lock = threading.Lock()
        self._masses: list[float] = []
        self._retries_told = 0
        self._warned_of_mass = False

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            columns = columns_of(prompt)
            for column in named_columns(self._question):
                if column not in columns:
                    raise ValueError(
                        f"the question names {{{column}}}, and the row of the prompt "
                        f"{prompt.text[:200]!r} has no such column{near(column, columns)}"
                    )
            if self._way == "read":
                wanted_text(prompt)
            if self._way == "questions":
                question_rows(prompt, self._questions)

    def open(self, context: RewardContext) -> None:
        judges = context.judges
        if self._judge and self._judge not in judges:
            raise ValueError(
                f"judge={self._judge} is not in the config's section `judge`"
                f"{near(self._judge, judges)}; it has: {', '.join(judges) or 'none'}"
            )
        urls = judges[self._judge] if self._judge else self._urls
        client = VlmClient(
            urls,
            self._model,
            headers=self._headers,
            timeout_s=self._timeout_s,
            deadline_s=self._deadline_s,
        )
        self._client = client
        if self._way in ("answers", "questions", "against"):
            self._tokens = client.tokens(self._values)
        client.try_out(2 if self._against else 1, self._tokens)

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float | None]:
        if self._way == "against":
            return self._win_rates(samples)
        score: Callable[[RewardSample], float | None] = {
            "answers": self._answers_score,
            "read": self._read_score,
            "pattern": self._pattern_score,
            "questions": self._questions_score,
        }[self._way]
        return [score(sample) for sample in samples]

    def figures(self) -> Mapping[str, float]:
        if self._client is None:
            return {}
        retries = self._client.pool.retries
        figures = {"retries": float(retries - self._retries_told)}
        self._retries_told = retries
        with self._lock:
            masses = self._masses
            self._masses = []
        if masses:
            figures["mass"] = math.fsum(masses) / len(masses)
            self._warn_of_mass(figures["mass"])
        return figures

    def close(self) -> None:
        if self._client:
            self._client.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answers_score(self, sample: RewardSample) -> float | None:
        return self._expectation([_picture(sample)], fill(self._question, sample.prompt))

    def _read_score(self, sample: RewardSample) -> float:
        return text_score(self._text(sample), wanted_text(sample.prompt))

    def _pattern_score(self, sample: RewardSample) -> float | None:
        assert self._pattern
        text = self._text(sample)
        value = number_in(text, self._pattern, self._scale)
        if value is None:
            logger.warning(
                "reward %s failed on sample %d of prompt %r: pattern=%r finds no number from %g to "
                "%g in the answer %r",
                self.name,
                sample.sample_index,
                sample.prompt.text[:200],
                self._pattern.pattern,
                *self._scale,
                text[:500],
            )
        return value

    def _questions_score(self, sample: RewardSample) -> float:
        picture = _picture(sample)

        def probability(row: tuple[str, str]) -> float:
            question = ONE_WORD.format(without_special_tokens(row[0]))
            tokens = self._asked.tokens(wanted_answers(*row))
            _, mass = tokens.expectation(self._asked.log_probs([picture], question, tokens))
            return mass

        rows = question_rows(sample.prompt, self._questions)
        probabilities = list(self._threads.map(probability, rows))
        if self._mean == "geometric":
            return math.prod(probabilities) ** (1 / len(probabilities))
        return math.fsum(probabilities) / len(probabilities)

    def _win_rates(self, samples: Sequence[RewardSample]) -> list[float | None]:
        """Return each sample's mean of P(better) over its opponents; 0.5 for a lone sample."""
        if len(samples) == 1:
            return [0.5]
        pictures = list(map(_picture, samples))
        question = fill(self._question, samples[0].prompt)
        pairs = opponents(len(samples), self._against)
        # In both orders, as models prefer a place.
        orders = [*pairs, *((second, first) for first, second in pairs)]

        def first_wins(order: tuple[int, int]) -> float | None:
            return self._expectation([pictures[index] for index in order], question)

        wins: list[list[float]] = [[] for _ in samples]
        for (first, second), chance in zip(orders, self._threads.map(first_wins, orders)):
            if chance is not None:
                wins[first].append(chance)
                wins[second].append(1.0 - chance)
        return [math.fsum(chances) / len(chances) if chances else None for chances in wins]

    def _expectation(self, pictures: Sequence[str], question: str) -> float | None:
        assert self._tokens
        log_probs = self._asked.log_probs(pictures, question, self._tokens)
        value, mass = self._tokens.expectation(log_probs)
        with self._lock:
            self._masses.append(mass)
        if mass == 0.0:
            logger.warning(
                "reward %s failed on the question %r: none of the answers %s is among the model's "
                "likeliest, which are %s",
                self.name,
                question[:200],
                list(self._values),
                sorted(log_probs, key=log_probs.__getitem__)[-3:],
            )
            return None
        return value

    def _text(self, sample: RewardSample) -> str:
        question = fill(self._question, sample.prompt)
        return self._asked.text([_picture(sample)], question, max_tokens=self._max_tokens)

    @property
    def _asked(self) -> VlmClient:
        assert self._client, "open() comes before score()"
        return self._client

    def _warn_of_mass(self, mass: float) -> None:
        if mass >= MIN_MASS or self._warned_of_mass:
            return
        self._warned_of_mass = True
        logger.warning(
            "reward %s: the answers %s have %.2f of the first token's probability, below %g: "
            "scores are of what the model would hardly say. A thinking model begins with its "
            "thoughts: serve another, or ask so that it answers with one of these words",
            self.name,
            list(self._values),
            mass,
            MIN_MASS,
        )


def _picture(sample: RewardSample) -> str:
    return picture_url(sample.pixels[len(sample.pixels) // 2])


def _only_one(ways: Mapping[str, object]) -> str:
    """Return the way to a score that is asked for, by default "answers"."""
    chosen = [way for way, value in ways.items() if value]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are {len(chosen)} ways to a score; keep 1")
    return chosen[0] if chosen else "answers"


def _check_question(question: str, way: str) -> None:
    if way == "pattern" and not question:
        raise ValueError("pattern needs the question that is answered so; set question")
    if way == "questions" and question:
        raise ValueError(f"question={question!r} beside questions, which are the row's own")


def _check_against(against: int) -> None:
    if against < 0 or against % 2:
        raise ValueError(
            f"against={against} must be even and at least 2: each sample meets as many of its "
            "group before it as behind it"
        )
