"""What `megadiff serve` makes of its arguments, before anything is loaded."""

import pytest

from megadiff.cli import serve as command
from megadiff.rollout.spec import ReplicaSpec


@pytest.fixture
def served(monkeypatch):
    """What would be served, with which token."""
    calls = []
    monkeypatch.setattr(command, "serve", lambda spec, *, token: calls.append((spec, token)))
    monkeypatch.setenv("MEGADIFF_TOKEN", "")
    return calls


def test_a_spec_file_and_flags_serve_the_same(served, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADIFF_TOKEN", "a-secret-of-20-chars")
    spec = ReplicaSpec(model=tmp_path, port=0, dtype="float32", fp8_in_place=True)
    file = tmp_path / "a.json"
    file.write_text(spec.to_json())
    assert command.main(["--spec", str(file)]) == 0
    assert command.main([str(tmp_path), *"--port 0 --dtype float32 --fp8-in-place".split()]) == 0
    assert served == [(spec, "a-secret-of-20-chars")] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no model; give a diffusers pipeline folder, or --spec FILE"),
        (["m", "--tp", "2", "--spec", "a.json"], "leave out MODEL, --tp, or --spec"),
        (["--spec", "nowhere.json"], "--spec nowhere.json cannot be read"),
    ],
)
def test_arguments_that_cannot_work(served, capsys, arguments, told):
    assert command.main(arguments) == 2
    assert told in capsys.readouterr().err
    assert not served
