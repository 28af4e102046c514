"""What `megadiff serve` makes of its arguments, before anything is loaded."""

import signal
from pathlib import Path

import pytest

from megadiff.cli import serve as command
from megadiff.rollout.spec import ReplicaSpec

CONFIG = """
run: {dir: here/runs, name: test, device: cpu}
model: {path: model, dtype: bfloat16, float32_streams: true}
data: {prompts: prompts.txt}
train: {num_steps: 3, prompts_per_step: 4}
algorithm: {group_size: 4}
rollout: {height: 64, width: 64, mode: separate, registry: replicas, tp: 2, compile: true}
optim: {lr: 1e-4}
reward: {color: {type: color}}
"""


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
        ([], "no model; give a diffusers pipeline folder, the CONFIG.yaml of a run, or --spec"),
        (["m", "--tp", "2", "--spec", "a.json"], "leave out m, --tp, or --spec"),
        (["nowhere.yaml"], "no config file nowhere.yaml"),
        (["--spec", "nowhere.json"], "--spec nowhere.json cannot be read"),
    ],
)
def test_arguments_that_cannot_work(served, capsys, arguments, told):
    assert command.main(arguments) == 2
    assert told in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "70000"], "--port 70000 must be from 0"),
        (["--name", "a/b"], "--name 'a/b' is not 1 to 200 bytes"),
        (["--registry", "a_file"], "--registry a_file: no file can be written there"),
    ],
)
def test_what_cannot_be_announced_is_told_before_anything_loads(
    tmp_path, monkeypatch, capsys, arguments, told
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    Path("a_file").touch()
    assert command.main([str(tmp_path), *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_a_config_says_how_its_replicas_run(served, config):
    assert command.main([config, "--name", "a", "sync.transport=disk", "rollout.tp=1"]) == 0
    spec = ReplicaSpec(
        model=Path("model"),
        name="a",
        run="test",
        port=0,
        device="cpu",
        dtype="bfloat16",
        registry=Path("replicas"),
        weights=Path("here/runs/test/weights"),
        compile=True,
        float32_streams=True,
    )
    assert served == [(spec, None)]


def test_the_folder_of_transport_disk_is_the_configs(served, config):
    assert command.main([config, "sync.transport=disk", "sync.folder=/shared/w"]) == 0
    assert command.main([config, "sync.folder=/shared/w"]) == 0
    assert [spec.weights for spec, _ in served] == [Path("/shared/w"), None]


def test_the_host_is_the_address_towards_the_trainer(served, config, monkeypatch):
    for trainer in ("127.0.0.2", ""):
        monkeypatch.setenv("MASTER_ADDR", trainer)
        monkeypatch.setenv("MASTER_PORT", "29500")
        assert command.main([config]) == 0
    assert command.main([config, "--host", "10.0.0.1"]) == 0
    hosts = [spec.host for spec, _ in served]
    assert hosts[0].startswith("127.0.0.") and hosts[1:] == ["127.0.0.1", "10.0.0.1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tp", "2"], "--tp 2 beside a config, which has rollout.tp; give rollout.tp=… instead"),
        (["--fp8"], "--fp8 True beside a config, which has rollout.fp8"),
        (["model.dtype=float16"], "model.dtype='float16' is not one of float32, bfloat16"),
        (["rollout.registry=''"], "rollout.mode=separate needs rollout.registry"),
        (["rollout.tpp=2"], "unknown key rollout.tpp; did you mean rollout.tp?"),
    ],
)
def test_settings_beside_a_config_that_cannot_work(served, config, capsys, arguments, told):
    assert command.main([config, *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not served


def test_a_trainer_that_this_host_does_not_find(served, config, monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert command.main([config]) == 2
    assert "finds no way to 'no-such-host.invalid'" in capsys.readouterr().err
