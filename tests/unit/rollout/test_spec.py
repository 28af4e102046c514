"""One spec of a replica: its file and its flags say the same, and mistakes are told."""

import json
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest

from megadiff.rollout.spec import ReplicaSpec, add_flags, flag_of, read_spec

WHOLE = ReplicaSpec(
    model=Path("models/a"),
    family="my_family:MyAdapter",
    name="replica_0",
    run="my_run",
    host="10.0.0.1",
    port=0,
    url="https://10.0.0.1:8443",
    device="cpu",
    dtype="float32",
    registry=Path("run/replicas"),
    stacks=Path("runs/a/stacks"),
    weights=Path("run/weights"),
    tp=2,
    parent_pid=17,
    compile=True,
    fp8=True,
    fp8_in_place=True,
    stage_config=Path("stages.yaml"),
    float32_streams=True,
    shared_base=True,
)


def parse(*arguments: str) -> ReplicaSpec:
    parser = ArgumentParser()
    parser.add_argument("model", type=Path)
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
    file = tmp_path / "a.json"
    file.write_text(WHOLE.to_json())
    assert read_spec(file) == WHOLE


def test_what_is_left_out_has_its_default(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"model": "m", "registry": null}')
    assert read_spec(file) == parse("m") == ReplicaSpec(model=Path("m"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fp_8": True}, "fp_8 is True. Unexpected .*; keys are model, .* fp8, "),
        ({"token": "a-secret"}, "token is 'a-secret'. Unexpected "),
        ({"tp": "2"}, "tp is '2'. Input should be a valid integer"),
        ({"tp": True}, "tp is True. Input should be a valid integer"),
        ({"tp": None}, "tp is None. Input should be a valid integer"),
        ({"fp8": 1}, "fp8 is 1. Input should be a valid boolean"),
        ({"model": 3}, "model is 3. Input should be a valid string"),
        ({"dtype": "float16"}, "dtype is 'float16'. Input should be 'float32' or 'bfloat16'"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_fix(tmp_path, changes, told):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(json.loads(WHOLE.to_json()) | changes))
    with pytest.raises(ValueError, match=f"--spec {file}: {told}"):
        read_spec(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be .* object"),
        ("{}", "model is .* required"),
        (None, "cannot be read: .*; give a JSON file"),
    ],
)
def test_a_file_that_is_no_spec(tmp_path, text, told):
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_spec(file)
