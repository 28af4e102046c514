"""Errors are told as sentences, and those of libraries with their class."""

import json

import pytest

from megadiff.process.words import error_text
from megadiff.rewards.answers import WrongAnswer


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("seed=2 is odd"), "seed=2 is odd"),
        (WrongAnswer("3 numbers"), "3 numbers"),
        (ValueError(), "ValueError: "),
        (KeyError("weight"), "KeyError: 'weight'"),
        (json.JSONDecodeError("no value", "", 0), "JSONDecodeError: no value: line 1 column 1"),
    ],
)
def test_only_foreign_errors_are_told_with_their_class(error: Exception, text: str) -> None:
    assert error_text(error).startswith(text)
