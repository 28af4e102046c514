"""Reward vlm: score what a vision-language model answers about a picture."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from megadiff.process.doors import near
from megadiff.rewards.base import Reward, RewardContext, RewardSample
from megadiff.rewards.http_pool import HttpPool, bearer_header, check_urls
from megadiff.rewards.ocr import text_score, wanted_text
from megadiff.rewards.vlm_answers import (
    AnswerTokens,
    check_answers,
    check_pattern,
    fill,
    number_in,
    opponents,
    question_rows,
    wanted_answers,
    without_special_tokens,
)
from megadiff.rewards.vlm_client import VlmClient, given_url, picture_url
from megadiff.types import Prompt

logger = logging.getLogger(__name__)
YES_NO = {"yes": 1.0, "no": 0.0}
FIRST_OR_SECOND = {"A": 1.0, "B": 0.0}
ONE_WORD = "{} Answer in one word."  # GenEval 2
QUESTIONS = {  # way of asking → its default question
    "answers": 'Does this image show "{prompt}"? Please answer yes or no.',
    "read": "Please output only the text content from the image without any additional "
    "descriptions or formatting.",
    "images": 'The last image was made from what comes before it, by the instruction "{prompt}". '
    "Was it followed, and everything else left as it was? Please answer yes or no.",
    "against": 'The first image is A, the second is B. Which of them shows "{prompt}" better? '
    "Please answer A or B.",
}
IN_FLIGHT = 32
MIN_MASS = 0.5  # below it the model would mostly say something else


@dataclass(kw_only=True, eq=False)
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

    images: the row's own image or images are shown in front of the picture, before an edit and
    after it.
    max_tokens: of an answer in text. timeout_s, deadline_s: of a request, and with its retries.
    token_env: the environment variable with the key of one's own servers.
    """

    judge: str = ""
    url: str | Sequence[str] = ()
    model: str = ""
    question: str = ""
    answers: Mapping[str, float] | None = None
    read: str = ""
    pattern: str = ""
    scale: Sequence[float] = (1, 5)
    questions: str = ""
    mean: str = "arithmetic"
    against: int = 0
    images: bool = False
    max_tokens: int = 1024
    timeout_s: float = 60.0
    deadline_s: float = 240.0
    token_env: str = ""

    workers = IN_FLIGHT

    def __post_init__(self) -> None:
        if bool(self.judge) == bool(self.url):
            raise ValueError(
                f"judge={self.judge!r} and url={self.url!r}: need one of them; judge names a "
                "server of the config's section `judge`, url is a server of your own, as "
                "http://host:port"
            )
        self._check_way()
        self._values = check_answers(FIRST_OR_SECOND if self.against else self.answers or YES_NO)
        self._pattern = check_pattern(self.pattern, self.scale) if self.pattern else None
        # Other clients are given the URL with /v1.
        self._urls = [row.removesuffix("/v1") for row in check_urls(self.url)] if self.url else []
        self._headers = bearer_header(self.token_env)
        self.samples_per_call = None if self.against else 1
        # These ask many questions a call: two calls keep the servers busy, and more would wait for
        # each other until timeout_s.
        if self.against or self.questions:
            self.workers = 2

        self._client: VlmClient | None = None
        self._tokens: AnswerTokens | None = None
        # For the questions inside one call.
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="vlm")
        self._masses: list[float] = []
        self._warned_of_mass = False

    def _check_way(self) -> None:
        """Choose the question. Raises ValueError for arguments that do not go together."""
        names = ("answers", "read", "pattern", "questions", "against")
        ways = [way for way in names if getattr(self, way)]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} are {len(ways)} ways to a score; keep 1")
        if self.read not in ("", "ocr"):
            raise ValueError(f"read={self.read!r}; ocr is the only value")
        if not isinstance(self.questions, str):
            raise ValueError(f"questions={self.questions!r} must be the name of a column")
        if self.mean not in ("arithmetic", "geometric"):
            raise ValueError(f"mean={self.mean!r}; give arithmetic or geometric")
        if self.pattern and not self.question:
            raise ValueError("pattern needs the question that is answered so; set question")
        if self.questions and self.question:
            raise ValueError(
                f"question={self.question!r} beside questions, which are the row's own"
            )
        if self.against < 0 or self.against % 2:
            raise ValueError(
                f"against={self.against} must be even and at least 2: each sample meets as many "
                "of its group before it as behind it"
            )
        if self.images and not self.question and ways not in ([], ["answers"], ["questions"]):
            raise ValueError(
                f"images=true with {ways[0]} has no question of its own, which must say what comes "
                "first; set question"
            )
        way = "images" if self.images and not self.questions else (ways or ["answers"])[0]
        self.question = self.question or QUESTIONS.get(way, "")

    def validate(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            fill(self.question, prompt)
            if self.read:
                wanted_text(prompt)
            if self.questions:
                question_rows(prompt, self.questions)
            if self.images and not prompt.images:
                raise ValueError(
                    f"images=true, and the row of the prompt {prompt.text[:200]!r} has 0 images; "
                    "give it an `image` and set rollout.images=true"
                )

    def open(self, context: RewardContext) -> None:
        judges = context.judges
        if self.judge and self.judge not in judges:
            raise ValueError(
                f"judge={self.judge} is not in the config's section `judge`"
                f"{near(self.judge, judges)}; it has: {', '.join(judges) or 'none'}"
            )
        urls = judges[self.judge] if self.judge else self._urls
        pool = HttpPool(
            urls,
            timeout_s=min(self.timeout_s, self.deadline_s),
            deadline_s=self.deadline_s,
            headers=self._headers,
        )
        self._client = VlmClient(pool, self.model)
        if not (self.read or self.pattern):
            self._tokens = self._client.tokens(self._values)
        num_pictures = (2 if self.against else 1) + self.images
        self._client.try_out(num_pictures, self._tokens)

    def score(self, samples: Sequence[RewardSample]) -> Sequence[float | None]:
        if self.against:
            return self._win_rates(samples)
        return [self._score(sample) for sample in samples]

    def figures(self) -> Mapping[str, float]:
        if self._client is None:
            return {}
        figures = self._client.pool.figures()
        masses = self._masses.copy()
        del self._masses[: len(masses)]  # not those that threads have added meanwhile
        if masses:
            figures["mass"] = fmean(masses)
            self._warn_of_mass(figures["mass"])
        return figures

    def close(self) -> None:
        if self._client:
            self._client.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, sample: RewardSample) -> float | None:
        pictures = [*self._given(sample), _picture(sample)]
        if self.questions:
            return self._questions_score(pictures, sample.prompt)
        question = fill(self.question, sample.prompt)
        if self._tokens:
            return self._expectation(pictures, question)

        text = self._asked.text(pictures, question, max_tokens=self.max_tokens)
        if not self._pattern:
            return text_score(text, wanted_text(sample.prompt))
        value = number_in(text, self._pattern, self.scale)
        if value is None:
            logger.warning(
                "reward %s failed on sample %d of prompt %r: pattern=%r finds no number from %g to "
                "%g in the answer %r",
                self.name,
                sample.sample_index,
                sample.prompt.text[:200],
                self._pattern.pattern,
                *self.scale,
                text[:500],
            )
        return value

    def _questions_score(self, pictures: Sequence[str], prompt: Prompt) -> float:
        def probability(row: tuple[str, str]) -> float:
            question = ONE_WORD.format(without_special_tokens(row[0]))
            tokens = self._asked.tokens(wanted_answers(*row))
            return tokens.expectation(self._asked.log_probs(pictures, question, tokens))[1]

        rows = question_rows(prompt, self.questions)
        probabilities = list(self._threads.map(probability, rows))
        if self.mean == "geometric":
            return math.prod(probabilities) ** (1 / len(probabilities))
        return fmean(probabilities)

    def _win_rates(self, samples: Sequence[RewardSample]) -> list[float | None]:
        """Return each sample's mean of P(better) over its opponents; 0.5 for a lone sample."""
        if len(samples) == 1:
            return [0.5]
        pictures = list(map(_picture, samples))
        given = self._given(samples[0])
        question = fill(self.question, samples[0].prompt)
        pairs = opponents(len(samples), self.against)
        # In both orders, as models prefer a place.
        orders = [*pairs, *((second, first) for first, second in pairs)]

        def first_wins(order: tuple[int, int]) -> float | None:
            return self._expectation([*given, *(pictures[index] for index in order)], question)

        wins: list[list[float]] = [[] for _ in samples]
        for (first, second), chance in zip(orders, self._threads.map(first_wins, orders)):
            if chance is not None:
                wins[first].append(chance)
                wins[second].append(1.0 - chance)
        return [fmean(chances) if chances else None for chances in wins]

    def _given(self, sample: RewardSample) -> list[str]:
        """Return the images that the sample was made from, none larger than the sample."""
        if not self.images:
            return []
        longest = max(sample.pixels.shape[1:3])
        return [given_url(file, longest) for file in sample.prompt.images]

    def _expectation(self, pictures: Sequence[str], question: str) -> float | None:
        assert self._tokens
        log_probs = self._asked.log_probs(pictures, question, self._tokens)
        value, mass = self._tokens.expectation(log_probs)
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
