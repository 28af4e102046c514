"""How replicas are started, and when they are awake.

The threads of a CPU machine are divided: too many of them wait for one another instead of working.
"""

import os
import re
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadiff.config.schema import Config, ModelConfig, RolloutConfig, RunConfig
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import local_world_size_of
from megadiff.rollout.client import processes
from megadiff.rollout.client.processes import TOKEN_FILE, environment_token
from megadiff.rollout.limits import RUN_CHARS
from megadiff.rollout.spec import ReplicaSpec
from megadiff.train.connect import check_arithmetic, run_id
from megadiff.train.replicas import (
    _launch,
    check_num_replicas,
    fresh_token,
    launch,
    registry_folder,
    replica_spec,
    threads_each,
    users_of,
)
from tests.meshes import one_rank_mesh

CODE = {"megadiff": "1", "torch": "2"}


@pytest.fixture
def four_threads():
    """As OMP_NUM_THREADS=4 gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("count", "num_threads"), [(1, 4), (2, 2), (3, 1), (8, 1)])
def test_replicas_together_have_the_threads_of_the_trainer(four_threads, count, num_threads):
    assert threads_each(one_rank_mesh(), count) == num_threads


def test_the_threads_of_all_ranks_of_the_node_count(four_threads):
    assert threads_each(SimpleNamespace(local_world_size=2), 1) == 8


def test_readme_names_the_files_of_a_runs_replicas():
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    run = Path("runs/NAME")
    registry = replica_spec(_config(1), one_rank_mesh(), run, name="replica_0").registry
    assert f"`url` of `{registry / 'replica_0.json'}`" in readme
    assert f"$(cat {registry_folder(run) / TOKEN_FILE})" in readme


def test_a_replica_of_a_run_ends_with_it_and_one_of_a_script_does_not():
    assert replica_spec(_config(1), one_rank_mesh(), Path("run"), name="a").ends_with_run
    assert not ReplicaSpec(model=Path("m"), parent_pid=1).ends_with_run


@pytest.mark.parametrize("streams", [False, True])
def test_replicas_have_the_trainers_streams(streams):
    config = _config(1)
    config.model.float32_streams = streams
    assert replica_spec(config, one_rank_mesh(), Path("run"), name="a").float32_streams == streams


@pytest.mark.parametrize(("fp8", "sleep"), [(True, "always"), (True, "never"), (False, "always")])
def test_fp8_weights_take_the_place_of_others_where_every_push_brings_all(fp8, sleep):
    config = _config(1)
    config.rollout.fp8 = fp8
    config.rollout.sleep = sleep
    spec = replica_spec(config, one_rank_mesh(), Path("run"), name="a")
    assert spec.fp8 == fp8
    assert spec.fp8_in_place == (fp8 and sleep == "always")
    # the weights of a mapped base are not the replica's to free
    mapping = replica_spec(config, one_rank_mesh(), Path("run"), name="a", shared_base=True)
    assert not mapping.fp8_in_place


@pytest.mark.parametrize(
    ("arithmetic", "told"),
    [
        (
            {"dtype": "bfloat16", "fp8": True, "float32_streams": False},
            "has fp8=True, the run rollout.fp8=False; start it without --fp8, or set",
        ),
        (
            {"dtype": "bfloat16", "fp8": False, "float32_streams": True},
            "start it without --float32-streams, or set model.float32_streams=true",
        ),
        (
            {"dtype": "float32", "fp8": False, "float32_streams": False},
            "in float32, the run has model.dtype=bfloat16; restart it with --dtype bfloat16, or",
        ),
        (None, "runs megadiff that it does not tell, and the run began with megadiff 1; start"),
        ({"code": {"megadiff": "7", "torch": "2"}}, "runs megadiff 7, .* with megadiff 1; start"),
        ({"code": {"megadiff": "1", "torch": "7"}}, "runs torch 7, .* with torch 2; start"),
    ],
)
def test_replicas_that_compute_otherwise_are_refused(arithmetic, told):
    replica = {
        "name": "r",
        "url": "http://h:1",
        "health": {"arithmetic": {"code": CODE} | arithmetic} if arithmetic else {},
    }
    with pytest.raises(ValueError, match=told):
        check_arithmetic(replica, _config(1), code=CODE)
    alike = {"code": CODE, "dtype": "bfloat16", "fp8": False, "float32_streams": False}
    check_arithmetic(replica | {"health": {"arithmetic": alike}}, _config(1), code=CODE)


def test_a_separate_replica_may_have_another_torch_but_no_other_megadiff():
    config = _config(1)
    config.rollout.mode = "separate"
    arithmetic = {"dtype": "bfloat16", "fp8": False, "float32_streams": False}
    for megadiff, is_refused in (("1", False), ("7", True)):
        code = {"megadiff": megadiff, "torch": "7"}
        health = {"arithmetic": arithmetic | {"code": code}}
        replica = {"name": "r", "url": "http://h:1", "health": health}
        with pytest.raises(ValueError, match="runs megadiff 7") if is_refused else nullcontext():
            check_arithmetic(replica, config, code=CODE)


def test_a_run_keeps_its_id_and_a_copy_has_another(tmp_path):
    config = _config(1)
    first = run_id(config, tmp_path / "run")
    assert re.fullmatch("mine-[0-9a-f]{8}", first)
    assert run_id(config, tmp_path / "run") == first
    assert run_id(config, tmp_path / "other") != first
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    config.run.name = "copy"
    assert run_id(config, tmp_path / "copy") != first.replace("mine", "copy")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run_id"]


def test_an_id_that_is_torn_is_drawn_again(tmp_path):
    (tmp_path / "run_id").write_text("0123")
    drawn = run_id(_config(1), tmp_path)
    assert drawn != "mine-0123" and run_id(_config(1), tmp_path) == drawn


def test_an_id_is_a_header(tmp_path):
    config = _config(1)
    for name in ("Über 1/b\r\nX: y", "漢" * 40, "x" * 300):
        config.run.name = name
        found = run_id(config, tmp_path)
        assert re.fullmatch("[!-~]+-[0-9a-f]{8}", found) and len(found) <= RUN_CHARS


@pytest.mark.parametrize("given", ["", "the-users-own-token"])
def test_replicas_that_a_run_starts_have_a_token(tmp_path, monkeypatch, given):
    """Drawn where the user gave none; one that the user gave is written nowhere."""
    monkeypatch.setenv("MEGADIFF_TOKEN", given)
    monkeypatch.setattr(processes, "serve_command", lambda *_: ["true"])
    tokens = []
    for _ in range(2):  # the second start finds what the first left
        token = fresh_token(tmp_path)
        started = _launch(_config(2), one_rank_mesh(), tmp_path, token, shared_base=False)
        for process in started:
            process.process.wait(30)
        assert [process.token for process in started] == [token] * 2
        tokens.append(token)
        path = registry_folder(tmp_path) / "token"
        assert given or path.read_text().strip() == token
        assert path.exists() == (not given)
    assert tokens == [given, given] if given else len(set(tokens)) == 2


@pytest.mark.parametrize("odd", ["hushed\n", "two words", "húshed"])
def test_a_token_that_no_header_holds_is_refused_and_not_shown(tmp_path, monkeypatch, odd):
    monkeypatch.setenv("MEGADIFF_TOKEN", odd)
    for start in (lambda: fresh_token(tmp_path), environment_token):
        with pytest.raises(ValueError, match=f"{len(odd)} characters, has some") as error:
            start()
        assert odd.strip() not in str(error.value)


@pytest.mark.parametrize("rank", [0, 1, 4, 7])
def test_a_colocated_rank_shares_replicas_with_its_node(rank):
    """Eight ranks on two nodes, two model-parallel peers each: two dp ranks a node."""
    mesh = SimpleNamespace(
        rank=rank,
        node=rank // 4,
        node_source=rank // 4 * 4,
        local_world_size=4,
        sp=2,
        tp=1,
        dp=4,
        dp_rank=rank // 2,
        cpu_node_group="node",
        cpu_group="world",
    )
    config = _config(0)
    users = users_of(config, mesh)
    assert (users.source, users.group, users.node) == (mesh.node_source, "node", mesh.node)
    assert (users.here, users.dp_rank, users.dp) == (rank % 4 == 0, rank // 2 % 2, 2)
    config.rollout.mode = "separate"
    users = users_of(config, mesh)
    assert (users.source, users.group, users.node) == (0, "world", None)
    assert (users.here, users.dp_rank, users.dp) == (rank == 0, rank // 2, 4)


def test_nodes_have_equally_many_replicas(monkeypatch):
    for count in (0, 2, 6):
        check_num_replicas(_config(count), num_nodes=2)
    with pytest.raises(ValueError, match="rollout.num_replicas=3 over 2 nodes.*a multiple of 2"):
        check_num_replicas(_config(3), num_nodes=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="10 processes in all are no multiple of this node's 4"):
        local_world_size_of(10)


def _config(num_replicas):
    return Config(
        run=RunConfig(name="mine"),
        model=ModelConfig(path="m"),
        rollout=RolloutConfig(height=64, width=64, num_replicas=num_replicas),
    )


def test_a_folder_of_weights_is_one_runs(tmp_path):
    """A second one would remove the versions that replicas of the first are to load."""
    config = _config(1)
    config.rollout.mode = "separate"
    config.sync.transport = "disk"
    config.sync.folder = str(tmp_path / "weights")
    version = tmp_path / "weights" / "version_00000007"

    with ExitStack() as first, ExitStack() as second:
        assert launch(config, one_rank_mesh(), None, tmp_path / "first", first) == []
        version.mkdir()
        with pytest.raises(AgreedError) as refused:
            launch(config, one_rank_mesh(), None, tmp_path / "second", second)
        text = str(refused.value)
        assert f"weights is in use by another run ({tmp_path / 'first'}, pid {os.getpid()}" in text
        assert f"give {tmp_path / 'second'} another sync.folder" in text
        assert version.exists()

        first.close()  # that run has ended: what it left goes
        launch(config, one_rank_mesh(), None, tmp_path / "second", second)
        assert not version.exists()
