"""TLS in front of a replica: by nginx, with the settings that docs/many_nodes.md shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megadiff.process.bounded_http import BoundedHttp, NotTrusted
from megadiff.rollout.client.client import NotProven, ReplicaClient, ReplicaError
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.rollout.server import replica as replica_module
from megadiff.rollout.server.server import check_url
from megadiff.sync.bucket import bucket_manifest, encode_bucket
from megadiff.sync.transports import shared_memory
from tests.unit.process.strangers import Stranger
from tests.unit.rollout import tls_proxy
from tests.unit.rollout.served import announce, serving
from tests.unit.rollout.test_client_proof import assert_knows_nothing, pretend

pytestmark = pytest.mark.skipif(
    bool(tls_proxy.MISSING), reason=f"not installed: {', '.join(tls_proxy.MISSING)}"
)
TOKEN = "s3cret-" + "0" * 25
BUCKET = [("transformer.a", torch.randn(4_000_000))]  # larger than any buffer of the proxy


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls_proxy.make_authority(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture
def url(authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The proxy's address; behind it are the routes of a replica named `a`."""

    async def call(engine: object, method: str, *arguments: object) -> dict:
        return {"workers": [{"fingerprints": {}, "bound_modules": []}]}

    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    monkeypatch.setattr(replica_module, "call_worker", call)
    port = tls_proxy.free_port()
    url = f"https://localhost:{port}"
    with serving(bucket_manifest(BUCKET), tmp_path, name="a", token=TOKEN, announced=url) as behind:
        ports = {port: int(behind.rpartition(":")[2])}
        with tls_proxy.proxy(tmp_path / "proxy", authority.parent, ports):
            yield url


def test_a_replica_behind_tls_is_found_proven_and_pushed_to(
    url: str, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    announce(tmp_path, "a", url)
    (entry,) = wait_until_announced(tmp_path, count=1, timeout_s=60, token=TOKEN)
    assert entry["url"] == url

    client = ReplicaClient(url, "a", token=TOKEN, timeout_s=60, run="my-run")
    assert client.weights_places() == [{"host": "here"}]
    client.weights_begin(3, bucket_manifest(BUCKET))
    client.weights_bucket(encode_bucket(BUCKET))
    client.weights_commit(3)
    health = client.health()
    assert (health["policy_version"], health["run"]) == (3, "my-run")
    client.close()


def test_a_certificate_of_an_unknown_authority_gets_nothing(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without SSL_CERT_FILE; the message says what to set."""
    announce(tmp_path, "a", url)
    with caplog.at_level(logging.WARNING), pytest.raises(ReplicaDied, match="is not trusted"):
        wait_until_announced(tmp_path, count=1, timeout_s=3, token=TOKEN)
    assert f"{url}/health: its certificate is not trusted" in caplog.text
    assert "set SSL_CERT_FILE" in caplog.text


def test_an_impostor_behind_a_trusted_proxy_gets_nothing(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good certificate is no proof: many hosts of a network have one."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    port = tls_proxy.free_port()
    with Stranger(pretend) as stranger:
        ports = {port: int(stranger.url.rpartition(":")[2])}
        with tls_proxy.proxy(tmp_path / "proxy", authority.parent, ports):
            client = ReplicaClient(f"https://localhost:{port}", "a", token=TOKEN, timeout_s=20)
            with pytest.raises(NotProven, match="it gets neither token nor weights"):
                client.weights_places()
            client.close()
        assert_knows_nothing(stranger)


def test_a_replica_signs_the_proxys_address_only(
    url: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is called by another name is not the one that was announced."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    client = ReplicaClient(url.replace("localhost", "127.0.0.1"), "a", token=TOKEN, timeout_s=20)
    with pytest.raises(NotProven, match="does not call it https://localhost"):
        client.prove()
    client.close()


def test_nothing_is_said_in_clear_text(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the greeting waits for TLS: a port that has none sees a handshake alone."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with Stranger(pretend) as stranger:
        client = ReplicaClient(stranger.url.replace("http:", "https:"), "a", token=TOKEN)
        with pytest.raises(ReplicaError, match="failed"):
            client.prove(timeout_s=5)
        with pytest.raises(ReplicaError, match="failed"):
            client.weights_places()
        client.close()
        assert not stranger.asked


def test_a_certificate_for_another_host_is_refused(
    url: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    http = BoundedHttp(url.replace("localhost", "127.0.0.2"))
    with pytest.raises(NotTrusted, match="127.0.0.2"):
        http.request("GET", "/health", headers={}, timeout_s=10, max_bytes=1000)
    http.close()


@pytest.mark.parametrize(
    ("url", "token", "told"),
    [
        ("", None, ""),
        ("https://node.example:8443", TOKEN, ""),
        ("https://localhost:8443", None, ""),
        ("https://node.example:8443", None, "can be reached from other machines"),
        ("https://node.example", TOKEN, "must be https://HOST:PORT, without a path"),
        ("https://node.example:8443/a", TOKEN, "must be https://HOST:PORT, without a path"),
        ("node.example:8443", TOKEN, "must be https://HOST:PORT, without a path"),
    ],
)
def test_an_address_to_announce_is_checked_before_anything_is_loaded(
    url: str, token: str | None, told: str
) -> None:
    if not told:
        return check_url(url, token)
    with pytest.raises(ValueError, match=told):
        check_url(url, token)
