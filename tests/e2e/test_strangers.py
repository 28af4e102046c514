"""Who does not belong to a run gets neither token, weights nor samples, and is named.

The replica is behind TLS where nginx is installed, as docs/many_nodes.md sets it up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from megadiff.rollout.client import weight_target
from megadiff.rollout.client.client import ReplicaClient
from tests.e2e.conftest import Result, Trainer
from tests.e2e.pushes import folder_weights
from tests.e2e.replica import REQUEST, push, start
from tests.unit.process.strangers import Stranger
from tests.unit.rollout import tls_proxy
from tests.unit.rollout.test_client_proof import assert_knows_nothing, pretend

TOKEN = "s3cret-" + "0" * 25  # as of test_client_proof


@dataclass(frozen=True)
class Guarded:
    """A replica that has TOKEN. environment: what a run needs to reach it, but the token."""

    url: str
    registry: Path
    environment: dict[str, str]

    def client(self, run: str) -> ReplicaClient:
        return ReplicaClient(self.url, "replica-7", token=TOKEN, timeout_s=120, run=run)


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    secret = folder / "secret"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    options = ["--token-file", str(secret)]
    environment = {}

    with ExitStack() as stack:
        if not tls_proxy.MISSING:
            authority = tls_proxy.make_authority(folder / "certificates")
            environment["SSL_CERT_FILE"] = str(authority)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("SSL_CERT_FILE", str(authority))  # for the clients of this process
            port, replica_port = tls_proxy.free_port(), tls_proxy.free_port()
            ports = {port: replica_port}
            stack.enter_context(tls_proxy.proxy(folder / "proxy", authority.parent, ports))
            options += ["--port", str(replica_port), "--url", f"https://localhost:{port}"]

        server = start(tiny_model, folder, *options)
        stack.callback(server.end)
        yield Guarded(server.client.url, server.registry, environment)


Runs = Callable[..., Result]


@pytest.fixture
def run(trainer: Trainer, guarded: Guarded) -> Runs:
    """Runs one step with the replicas of the registry. token: '' for a run without one."""
    settings = ["rollout.mode=separate", f"rollout.registry={guarded.registry}"]

    def run_step(name: str, token: str = TOKEN, timeout_s: int = 120) -> Result:
        secrets = {**guarded.environment, "MEGADIFF_TOKEN": token}
        return trainer.run(
            *settings,
            "train.num_steps=1",
            f"rollout.start_timeout_s={timeout_s}",
            name=name,
            prepare=partial(prepare_run, secrets),
        )

    return run_step


def prepare_run(environment: dict[str, str]) -> None:
    """In the trainer's process. It waits for another run's silence no longer than needed."""
    os.environ.update(environment)
    weight_target.OWNER_SILENT_S = weight_target.GIVE_UP_S = 1.0


def test_an_impostor_in_the_registry_gets_nothing(guarded: Guarded, run: Runs) -> None:
    """Nor does it stop the run, which goes on with the replica that belongs to it."""
    with Stranger(pretend) as stranger:
        claim = guarded.registry / "a.json"  # the first by name
        claim.write_text(json.dumps({"name": "a", "url": stranger.url}))
        try:
            result = run("of_impostor")
        finally:
            claim.unlink()
        assert_knows_nothing(stranger)

    assert result.code == 0, result.stderr
    assert len(result.rows) == 1
    assert f"{claim}: a at {stranger.url}: what answers at {stranger.url} did not prove that " in (
        result.stderr
    )
    assert TOKEN not in result.stderr
    events = (result.folder / "events.jsonl").read_text()
    assert TOKEN not in events
    if not tls_proxy.MISSING:
        assert guarded.url.startswith("https:")


def test_a_second_run_on_the_same_registry_gets_nothing(
    guarded: Guarded, run: Runs, tiny_model: Path
) -> None:
    """The first one keeps its weights and draws the same samples as before."""
    first = guarded.client("first-run")
    weights = folder_weights(tiny_model, ("transformer",))
    push(first, weights, version=5, model=tiny_model)
    before = first.generate(REQUEST)

    result = run("second", timeout_s=6)
    assert result.code == 1
    assert not (result.folder / "metrics.jsonl").exists() or not result.rows
    told = f"replica-7 at {guarded.url} (it works for the run 'first-run'; give each run a registry"
    assert told in result.stderr, result.stderr

    health = first.health()
    assert (health["run"], health["policy_version"], health["state"]) == ("first-run", 5, "ready")
    assert torch.equal(first.generate(REQUEST).latents_GSLC, before.latents_GSLC)
    first.release()
    first.close()


@pytest.mark.parametrize("token", ["", "another-" + "1" * 24])
def test_a_run_without_the_token_gets_nothing(guarded: Guarded, run: Runs, token: str) -> None:
    result = run("outside", token=token, timeout_s=6)
    assert result.code == 1
    assert f"replica-7 at {guarded.url}: " in result.stderr
    reason = "it refused the trainer's proof" if token else "the trainer has none"
    assert reason in result.stderr or "has no token" in result.stderr
    assert not (result.folder / "metrics.jsonl").exists()
