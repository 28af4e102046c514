"""Turn words into a vision-language model's tokens, and its answers into numbers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megadiff.process.doors import near
from megadiff.types import Prompt

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS)}
OTHER_SPELLING = DIGITS | {digits: word for word, digits in DIGITS.items()}
_SPECIAL = re.compile(r"<\|.*?\|>", re.DOTALL)
_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class AnswerTokens:
    """Say which tokens begin which answers.

    values: a token as log_probs name it → its answer's value. ids: the tokens, () where the server
    does not tell them.
    """

    values: Mapping[str, float]
    ids: tuple[int, ...]

    def expectation(self, log_probs: Mapping[str, float]) -> tuple[float, float]:
        """Return the answers' expected value and their mass, the sum of their probabilities.

        log_probs: of the first token, by its name. A mass of 0 has no expectation: NaN.
        """
        mass = 0.0
        weighted = 0.0
        for name, value in self.values.items():
            probability = math.exp(log_probs.get(name, -math.inf))
            mass += probability
            weighted += probability * value
        return weighted / mass if mass else math.nan, mass


def answer_tokens(
    values: Mapping[str, float], first_token: Callable[[str], int] | None
) -> AnswerTokens:
    """Find the tokens with which each answer's written forms begin.

    values: answer → its value. first_token: a text → the id of its first token; None: not known.
    Raises ValueError for an answer that no token tells from the others.
    """
    named = {form: value for word, value in values.items() for form in word_forms(word)}
    if first_token is None:
        return AnswerTokens(values=named, ids=())

    values_of: dict[int, set[float]] = defaultdict(set)
    for form, value in named.items():
        values_of[first_token(form)].add(value)
    # " 1" begins with a token of the space alone where a tokenizer splits digits off.
    values_of.pop(first_token(" "), None)
    # A first token that answers of unlike value share tells nothing.
    by_id = {token: min(values) for token, values in values_of.items() if len(values) == 1}

    for word in values:
        if by_id.keys().isdisjoint(map(first_token, word_forms(word))):
            raise ValueError(
                f"answers: the model's tokens for {word!r} also begin another of {list(values)}, "
                "and only an answer's first token is read; choose answers that begin differently"
            )
    named |= {f"token_id:{token}": value for token, value in by_id.items()}
    return AnswerTokens(values=named, ids=tuple(sorted(by_id)))


def word_forms(word: str) -> list[str]:
    """Return how a model may write the word: in three cases, each also behind a space."""
    spellings = dict.fromkeys([word, word.lower(), word.capitalize()])
    return [*spellings, *(f" {spelling}" for spelling in spellings)]


def wanted_answers(question: str, answer: str) -> dict[str, float]:
    """Return the answers of value 1 to a question; a number counts as word and as digits."""
    word = answer.strip().lower()
    if question.strip().lower().startswith("how many") and word in OTHER_SPELLING:
        return {word: 1.0, OTHER_SPELLING[word]: 1.0}
    return {answer.strip(): 1.0}


def fill(question: str, prompt: Prompt) -> str:
    """Put the prompt's text and the row's other columns in place of their names in braces.

    Raises ValueError for a name that is no column.
    """
    columns = {**prompt.fields, "prompt": prompt.text}

    def value(match: re.Match[str]) -> str:
        column = match[1]
        if column not in columns:
            raise ValueError(
                f"the question names {{{column}}}, and the row of the prompt "
                f"{prompt.text[:200]!r} has no such column{near(column, columns)}"
            )
        return without_special_tokens(str(columns[column]))

    return _COLUMN.sub(value, question)


def without_special_tokens(text: str) -> str:
    """Cut out <|…|>: chat models read such text as control tokens, as the start of an answer."""
    # Again, as what is cut out of the middle may leave another one.
    while (shorter := _SPECIAL.sub("", text)) != text:
        text = shorter
    return text


def number_in(text: str, pattern: re.Pattern[str], scale: Sequence[float]) -> float | None:
    """Return the mean of the pattern's groups in the text's last match, as 0 … 1 of the scale.

    None where nothing matches, or a number is outside the scale.
    """
    matches = list(pattern.finditer(text))
    try:
        numbers = [float(number) for number in matches[-1].groups()]
    # no match, a group that did not take part, one of no number
    except (IndexError, TypeError, ValueError):
        return None
    low, high = scale
    if not all(low <= number <= high for number in numbers):
        return None
    return (sum(numbers) / len(numbers) - low) / (high - low)


def opponents(count: int, against: int) -> list[tuple[int, int]]:
    """Return the pairs of `count` samples that meet, each once.

    The samples stand in a circle; each meets as many before it as behind it, `against` in all.
    Where that is everybody or more, all meet.
    """
    if against >= count - 1:
        return [(first, second) for second in range(count) for first in range(second)]
    steps = range(1, against // 2 + 1)
    return [(first, (first + step) % count) for first in range(count) for step in steps]


def question_rows(prompt: Prompt, column: str) -> list[tuple[str, str]]:
    """Return the (question, answer) rows of a prompt. Raises ValueError for any other value."""
    value = prompt.fields.get(column)
    rows = value if isinstance(value, (list, tuple)) else []
    pairs = []
    for row in rows:
        match row:
            # Without a letter an answer has no first token.
            case [str(question), str(answer)] if question.strip() and answer.strip():
                pairs.append((question, answer))
    if not rows or len(pairs) < len(rows):
        raise ValueError(
            f"questions={column}: the row of the prompt {prompt.text[:200]!r} has {value!r} there; "
            "need [[question, answer], …], at least 1, of texts"
        )
    return pairs


def check_answers(answers: Mapping[str, float]) -> dict[str, float]:
    """Return answer → value. Raises ValueError where they cannot tell pictures apart."""
    if not isinstance(answers, Mapping):
        raise ValueError(f'answers={answers!r} must be values by answer, as {{"yes": 1, "no": 0}}')
    # YAML reads an unquoted yes as true.
    switches = [word for word in answers if isinstance(word, bool)]
    if switches:
        raise ValueError(f'answers has the key {switches[0]}; write it in quotes, as "yes": 1')
    values = {str(word).strip(): float(value) for word, value in answers.items()}
    if "" in values or len({word.lower() for word in values}) < len(answers):
        raise ValueError(f"answers={list(answers)}: each needs letters of its own, in any case")
    if len(set(values.values())) < 2 or not all(map(math.isfinite, values.values())):
        raise ValueError(
            f"answers={values}: need at least 2 different finite values, or every score is equal"
        )
    return values


def check_pattern(pattern: str, scale: Sequence[float]) -> re.Pattern[str]:
    """Compile it for number_in(). Raises ValueError for one without groups, and a wrong scale."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from None
    if not compiled.groups:
        raise ValueError(f"pattern={pattern!r} has 0 groups; put each number's part in brackets")
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ValueError(f"scale={list(scale)} must be [lowest, highest], e.g. [1, 5]")
    return compiled
