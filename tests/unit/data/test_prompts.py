from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megadiff.data.prompts import load_prompts, prompt_id


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_txt(tmp_path: Path) -> None:
    path = write(
        tmp_path, "p.txt", "\ufeffa red circle\r\n\n  # one \n\na blue\u2028cup\n红色的圆 🟥"
    )
    prompts = load_prompts(path, max_chars=100)
    assert [prompt.text for prompt in prompts] == [
        "a red circle",
        "# one",
        "a blue\u2028cup",
        "红色的圆 🟥",
    ]
    assert all(prompt.negative_text == " " and prompt.fields == {} for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == 4


def test_jsonl(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "a red circle",
            "negative_prompt": "blurry",
            "text": "HI",
            "n": 3,
            "tags": ["a"],
        },
        {"prompt": "a red circle", "negative_prompt": None},
        {"prompt": "ein \u2028 rotes\u0085Ö"},
    ]
    path = write(
        tmp_path,
        "p.jsonl",
        "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
    )
    first, second, third = load_prompts(path, max_chars=100)
    assert (first.negative_text, first.fields) == ("blurry", {"text": "HI", "n": 3, "tags": ["a"]})
    assert (second.negative_text, second.fields) == (" ", {})
    assert third.text == "ein \u2028 rotes\u0085Ö"
    assert first.id != second.id


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"prompt": ["a red circle", "été"], "negative_prompt": ["blurry", None], "n": [1, 2]}
    )
    parquet.write_table(table, tmp_path / "p.parquet")
    first, second = load_prompts(tmp_path / "p.parquet", max_chars=100)
    assert (first.text, first.negative_text, first.fields) == ("a red circle", "blurry", {"n": 1})
    assert (second.text, second.negative_text) == ("été", " ")

    parquet.write_table(pyarrow.table({"prompt": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match="row 2: 'prompt' is None"):
        load_prompts(tmp_path / "null.parquet", max_chars=100)
    with pytest.raises(ValueError, match="not a parquet file"):
        load_prompts(write(tmp_path, "bad.parquet", "prompt\nhello"), max_chars=100)


def test_a_parquet_file_that_python_cannot_hold(tmp_path: Path) -> None:
    dates = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    late = pyarrow.table({"prompt": ["a", "b"], "date": dates})
    parquet.write_table(late, tmp_path / "late.parquet")
    with pytest.raises(ValueError, match=r"late\.parquet: row 2: 'date' cannot be read"):
        load_prompts(tmp_path / "late.parquet", max_chars=100)

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    twice = pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: two columns are named 'prompt'"):
        load_prompts(tmp_path / "twice.parquet", max_chars=100)

    path = tmp_path / "torn.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a" * 9, "b"] * 5000}), path)
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"(?s)torn\.parquet is damaged .*fetch it again"):
        load_prompts(path, max_chars=100)


def test_the_same_prompt_has_the_same_id_in_every_format(tmp_path: Path) -> None:
    as_txt = load_prompts(write(tmp_path, "p.txt", "a red circle"), max_chars=100)[0]
    as_jsonl = load_prompts(
        write(tmp_path, "p.jsonl", '{"prompt": "a red circle", "n": 1}'), max_chars=100
    )[0]
    assert as_txt.id == as_jsonl.id == prompt_id("a red circle", " ") == "d5c443d25c466169"
    assert len(as_txt.id) == 16 and int(as_txt.id, 16) >= 0


def test_id_depends_on_where_the_texts_are_split() -> None:
    assert (
        len(
            {prompt_id("ab", "c"), prompt_id("a", "bc"), prompt_id("abc", ""), prompt_id("", "abc")}
        )
        == 4
    )


def test_length_limit(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "short\n" + "é" * 2000)
    assert len(load_prompts(path, max_chars=2000)[1].text) == 2000
    with pytest.raises(
        ValueError, match=r"p\.txt:2: 'prompt' has 2000 characters > data\.max_prompt_chars=1999"
    ):
        load_prompts(path, max_chars=1999)


def test_repeated_prompts_are_kept_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        prompts = load_prompts(write(tmp_path, "p.txt", "a\nb\na\na\n"), max_chars=100)
    assert [prompt.text for prompt in prompts] == ["a", "b", "a", "a"]
    assert "2 of 4 prompts repeat an earlier one" in caplog.text
    assert caplog.records[-1].levelno == logging.INFO


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "", ["p.txt", "0 prompts"]),
        ("p.txt", "\n  \n", ["0 prompts"]),
        ("p.txt", b"fine\nbad \xe9 byte\n", ["p.txt:2", "0xe9", "UTF-8"]),
        ("p.txt", "wide".encode("utf-16"), ["p.txt:1", "0xff", "UTF-8"]),
        ("p.csv", "prompt\na", ["'.csv'", ".txt, .jsonl, .parquet"]),
        ("p", "a", ["unknown suffix ''"]),
        (
            "p.jsonl",
            '{"prompt": "a"}\n\n{"prompt": "b"',
            ["p.jsonl:3", "not valid JSON", '{"prompt": "b"'],
        ),
        ("p.jsonl", "\n" + "[" * 100_000, ["p.jsonl:2", "not valid JSON", "nested too deep"]),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}', ["p.jsonl:1", "'prompt' comes twice"]),
        (
            "p.jsonl",
            '{"prompt": "a", "x": ' + "9" * 5000 + "}",
            ["p.jsonl:1", "4300", '{"prompt": "a", "x": 999'],
        ),
        ("p.jsonl", '["a"]', ["p.jsonl:1", "a list, must be an object"]),
        ("p.jsonl", '{"text": "a", "n": 1}', ["p.jsonl:1", "no 'prompt'", "['n', 'text']"]),
        ("p.jsonl", '{"prompt": 7}', ["p.jsonl:1", "7 (int)", "string"]),
        ("p.jsonl", '{"prompt": " "}', ["p.jsonl:1", "empty"]),
        (
            "p.jsonl",
            '{"prompt": "a", "negative_prompt": 1}',
            ["p.jsonl:1", "'negative_prompt' is 1"],
        ),
        ("p.jsonl", '{"prompt": "\\ud83d"}', ["p.jsonl:1", "surrogate"]),
    ],
)
def test_refusals_name_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        load_prompts(write(tmp_path, name, content), max_chars=100)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nope\.txt: no such file"):
        load_prompts(tmp_path / "nope.txt", max_chars=100)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match="not a file"):
        load_prompts(tmp_path / "folder.txt", max_chars=100)
