"""One spec of a replica: its file and its flags say the same, and mistakes are told."""

import json
import stat
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest

from megadiff.rollout.spec import ReplicaSpec, add_flags, flag_of, read_spec

WHOLE = ReplicaSpec(
    model=Path("models/a"),
    name="replica_0",
    host="10.0.0.1",
    port=0,
    device="cpu",
    dtype="float32",
    registry=Path("run/replicas"),
    weights=Path("run/weights"),
    tp=2,
    parent_pid=17,
    compile=True,
    fp8=True,
    fp8_in_place=True,
    float32_streams=True,
)


def parse(*arguments: str) -> ReplicaSpec:
    parser = ArgumentParser()
    add_flags(parser)
    given = vars(parser.parse_args(arguments))
    return ReplicaSpec(**{key: value for key, value in given.items() if value is not None})


def test_every_field_has_a_flag_and_both_make_the_same_spec(tmp_path):
    """A new field needs a value in WHOLE, and nothing else here."""
    arguments = ["models/a"]
    for field in fields(ReplicaSpec):
        value = getattr(WHOLE, field.name)
        assert value != field.default, f"give WHOLE.{field.name} another value than its default"
        if field.name != "model":
            arguments += (
                [flag_of(field.name)] if value is True else [flag_of(field.name), str(value)]
            )
    assert parse(*arguments) == WHOLE
    WHOLE.write(tmp_path / "a.json")
    assert read_spec(tmp_path / "a.json") == WHOLE


def test_what_is_left_out_has_its_default(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"model": "m", "registry": null}')
    assert read_spec(file) == parse("m") == ReplicaSpec(model=Path("m"))


def test_the_file_is_its_users_alone_also_where_another_was_before(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("{}")
    file.chmod(0o644)
    WHOLE.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fp_8": True}, "unknown key 'fp_8' with value True; did you mean 'fp8'"),
        ({"token": "a-secret"}, "unknown key 'token' .* keys are model, name"),
        ({"tp": "2"}, "tp is '2'; it must be a whole number"),
        ({"tp": True}, "tp is True; it must be a whole number"),
        ({"tp": None}, "tp is None; it must be a whole number"),
        ({"fp8": 1}, "fp8 is 1; it must be true or false"),
        ({"model": 3}, "model is 3; it must be text in quotes"),
        ({"dtype": "float16"}, "dtype='float16' is none of float32, bfloat16; give one"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_fix(tmp_path, changes, told):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(WHOLE.to_json() | changes))
    with pytest.raises(ValueError, match=f"--spec {file}: {told}"):
        read_spec(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read: .*; give a JSON file"),
        ("[]", "holds a list; it must hold a JSON object"),
        ("{}", "it has no key 'model'"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_spec(tmp_path, text, told):
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_spec(file)
