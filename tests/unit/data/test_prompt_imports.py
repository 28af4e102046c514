"""`megadiff prompts import` on rows in the shape of the public files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megadiff.cli.prompts import main
from megadiff.data.prompts import load_prompts
from megadiff.rewards.geneval import read_row
from megadiff.rewards.ocr import wanted_text

OCR = (
    'New York Skyline with "Hello World" written with fireworks on the sky.\n'
    '一张海报,上面写着“Grand Opening”,旁边有 "NOW" 字样\n'
)
GENEVAL = (
    '{"tag": "position", "include": [{"class": "cup", "count": 1}, {"class": "tv remote", '
    '"count": 1, "position": ["left of", 0]}], "prompt": "a photo of a tv remote left of a cup"}\n'
    '{"tag": "counting", "include": [{"class": "cup", "count": 3}], "exclude": [{"class": "cup", '
    '"count": 4}], "prompt": "a photo of three cups"}\n'
)
PICKSCORE = "a cat, 8k\n# not a comment\nan “old” man\u2028by the sea\n"
DRAWBENCH = (
    "Prompts,Category\n"
    "A red colored car.,Colors\n"
    '"A sign that says ""Diffusion"".",Text\n'
    '"One cat,\ntwo dogs.",Counting\n'
)
PUBLIC = {
    "ocr.txt": ("ocr", OCR),
    "geneval.jsonl": ("geneval", GENEVAL),
    "pickscore.txt": ("pickscore", PICKSCORE),
    "drawbench.csv": ("drawbench", DRAWBENCH),
}


def imported(tmp_path: Path, name: str, content: bytes) -> list:
    source = tmp_path / name
    source.write_bytes(content)
    out = tmp_path / "new" / "out.jsonl"
    assert main(["import", PUBLIC[name][0], str(source), str(out), "--force"]) == 0
    return load_prompts(out, max_chars=2000)


@pytest.mark.parametrize("name", PUBLIC)
def test_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path, name: str) -> None:
    text = PUBLIC[name][1]
    plain = imported(tmp_path, name, text.encode())
    windows = imported(tmp_path, name, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    # The one line break that a cell holds stays as it is in the file.
    assert [prompt.text.replace("\r\n", "\n") for prompt in windows] == [
        prompt.text for prompt in plain
    ]
    assert [prompt.fields for prompt in windows] == [prompt.fields for prompt in plain]


def test_ocr_prompts_bring_the_first_quoted_text(tmp_path: Path) -> None:
    prompts = imported(tmp_path, "ocr.txt", OCR.encode())
    assert [wanted_text(prompt) for prompt in prompts] == ["Hello World", "Grand Opening"]
    assert prompts[0].text == OCR.split("\n")[0]


def test_geneval_rows_are_what_the_reward_reads(tmp_path: Path) -> None:
    prompts = imported(tmp_path, "geneval.jsonl", GENEVAL.encode())
    position, counting = (read_row(prompt) for prompt in prompts)
    assert prompts[1].text == "a photo of three cups"
    assert (position.include[1].relation, position.include[1].target) == ("left of", 0)
    assert position.include[1].label == "tv remote"
    assert (counting.include[0].count, counting.exclude[0].count) == (3, 4)


def test_pickscore_and_drawbench_lines(tmp_path: Path) -> None:
    texts = [prompt.text for prompt in imported(tmp_path, "pickscore.txt", PICKSCORE.encode())]
    assert texts == ["a cat, 8k", "# not a comment", "an “old” man\u2028by the sea"]
    prompts = imported(tmp_path, "drawbench.csv", DRAWBENCH.encode())
    assert [prompt.fields["category"] for prompt in prompts] == ["Colors", "Text", "Counting"]
    assert prompts[1].text == 'A sign that says "Diffusion".'
    assert prompts[2].text == "One cat,\ntwo dogs."


@pytest.mark.parametrize(
    ("arguments", "content", "words"),
    [
        ("ocr s.txt", b"", "holds 0 prompts"),
        ("ocr s.txt", b"\xef\xbb\xbf\r\n\r\n", "holds 0 prompts"),
        ("ocr s.txt", b'a "b"\na plain prompt\n', "s.txt:2: read 'a plain prompt', wanted"),
        ("ocr s.txt", b'an empty "" quote\n', "in quotes"),
        ("ocr s.txt", b'a "b"\n\xff\n', "s.txt:2: byte 0xff is not UTF-8"),
        ("ocr s.jsonl", b'a "b"\n', "ocr needs .txt"),
        ("geneval s.jsonl", b"a photo of a cup\n", "s.jsonl:1: not valid JSON"),
        ("geneval s.jsonl", b'["a"]\n', "s.jsonl:1: a list"),
        ("geneval s.jsonl", b'{"prompt": "a", "include": []}\n', "`prompt` and `tag`"),
        ("geneval s.jsonl", b'{"prompt": "a", "tag": "counting"}\n', "wanted `include`"),
        ("geneval s.jsonl", b'{"prompt": "a", "tag": "b", "include": ["cup"]}', "wanted `include`"),
        ("geneval s.jsonl", b'{"prompt": "\\ud83d", "tag": "b", "include": []}', "s.jsonl:1"),
        ("pickscore s.txt", b'{"prompt": "a cat"}\n', "s.txt:1: read '{"),
        ("drawbench s.csv", b"a red car,Colors\n", "the columns Prompts, Category"),
        ("drawbench s.csv", b"Prompts,Category\n,Colors\n", "s.csv:2"),
        ("drawbench s.csv", b'Prompts,Category\na,b\n"a\n', "comma-separated"),
        ("drawbench missing.csv", b"", "no such file"),
    ],
)
def test_wrong_files_are_refused_with_line_and_leave_nothing(
    tmp_path: Path, arguments: str, content: bytes, words: str, capsys: pytest.CaptureFixture
) -> None:
    kind, name = arguments.split()
    if name != "missing.csv":
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert main(["import", kind, str(tmp_path / name), str(tmp_path / "out.jsonl")]) == 2
    assert words in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_file_stays_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "s.txt"
    source.write_text(OCR)
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    arguments = ["import", "ocr", str(source), str(out)]
    assert main(arguments) == 2 and "--force" in capsys.readouterr().err
    assert out.read_text() == "mine\n"
    assert main([*arguments, "--force"]) == 0
    assert capsys.readouterr().out == f"{out}: 2 prompts\n"

    assert main([*arguments[:3], str(tmp_path / "out.txt")]) == 2
    assert "must be .jsonl" in capsys.readouterr().err
    rows = tmp_path / "rows.jsonl"
    rows.write_text(GENEVAL)
    assert main(["import", "geneval", str(rows), str(rows), "--force"]) == 2
    assert rows.read_text() == GENEVAL
