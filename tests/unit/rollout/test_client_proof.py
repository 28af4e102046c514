"""Neither token nor weights go to an address before it has proved that it knows the token."""

import json
import logging
import threading
import time

import pytest
from httpcore import ConnectionPool

from megadiff.rollout.client import weight_target
from megadiff.rollout.client.client import NotProven, ReplicaClient, ReplicaError
from megadiff.rollout.client.fleet import Fleet
from megadiff.rollout.client.processes import ReplicaDied
from megadiff.rollout.client.registry import wait_until_announced
from megadiff.rollout.limits import RUN_HEADER
from megadiff.rollout.proof import REPLICA, TRAINER, new_nonce, sign
from tests.unit.process.strangers import Stranger, drip, reply
from tests.unit.rollout.served import announce, replica_routes
from tests.unit.rollout.supervised import supervised

TOKEN = "s3cret-" + "0" * 25
NO_PROOF = {"nonce": "0" * 32, "proof": "0" * 64}


def client_of(url, *, token=TOKEN, **arguments):
    return ReplicaClient(url, "a", token=token, timeout_s=20, **arguments)


def pretend(handler, body):
    """Answer as a replica named 'a' would, as far as a stranger can."""
    if handler.path == "/health":
        health = {"name": "a", "state": "ready", "arithmetic": {"fp8": False}}
        return reply(handler, json.dumps(health).encode())
    if handler.path == "/rl/hello":
        return reply(handler, json.dumps(NO_PROOF).encode())
    return reply(handler, b'{"workers": []}')


def assert_knows_nothing(stranger):
    assert stranger.asked
    assert TOKEN not in repr(stranger.asked)
    assert not any("Authorization" in headers for _, headers, _ in stranger.asked)
    assert {path for path, _, _ in stranger.asked} <= {"/health", "/rl/hello"}


def test_the_token_goes_to_a_replica_that_knows_it():
    with replica_routes("a", token=TOKEN) as url:
        client = client_of(url)
        assert client.weights_places() == [{"host": "here"}]
        client.close()


def test_a_stranger_gets_neither_token_nor_weights(tmp_path, caplog):
    with Stranger(pretend) as stranger:
        client = client_of(stranger.url)
        with pytest.raises(NotProven, match=f"at {stranger.url} did not prove that it knows the "):
            client.weights_begin(1, {"transformer.a": {"dtype": "float32", "shape": [1]}})
        client.close()
        announce(tmp_path, "a", stranger.url)
        with caplog.at_level(logging.WARNING), pytest.raises(ReplicaDied, match="0 of .*did not "):
            wait_until_announced(tmp_path, count=1, timeout_s=0.5, token=TOKEN)
        assert_knows_nothing(stranger)
    (record,) = caplog.records
    assert f"{tmp_path}/a.json: a at {stranger.url}: " in record.getMessage()


@pytest.mark.parametrize("lie", [{}, [], {"proof": None}, {"proof": 7}, {"proof": "é"}])
def test_other_answers_prove_nothing(lie):
    with Stranger(lambda handler, _: reply(handler, json.dumps(lie).encode())) as stranger:
        with pytest.raises(ReplicaError):
            client_of(stranger.url).trim()
        assert_knows_nothing(stranger)


def test_a_stranger_that_passes_the_challenge_on_is_refused():
    """The replica signs for its own address only, which is not the one that the trainer called."""
    with replica_routes("a", token=TOKEN) as url:

        def pass_on(handler, body):
            fields = {"Content-Type": "application/json"}
            with ConnectionPool() as pool:
                answer = pool.request(
                    handler.command, url + handler.path, headers=fields, content=body
                )
            passed_on.append(answer.status)
            reply(handler, answer.content, status=answer.status)

        passed_on = []
        with Stranger(pass_on) as stranger:
            with pytest.raises(NotProven, match=f"does not call it {url}"):
                client_of(stranger.url).trim()
            assert passed_on == [401]
            assert_knows_nothing(stranger)


def test_the_trainers_own_proof_and_an_older_one_are_none():
    old_nonce = new_nonce()

    def replay(handler, _):
        proof = sign(TOKEN, role=REPLICA, nonce=old_nonce, url=listener.url)
        reply(handler, json.dumps({"nonce": old_nonce, "proof": proof}).encode())

    for answer in (reply, replay):  # the first sends back what it got
        with Stranger(answer) as listener:
            with pytest.raises(NotProven):
                client_of(listener.url).trim()
            assert_knows_nothing(listener)


def test_a_replica_signs_for_nobody_who_has_not_proved_himself():
    nonce = new_nonce()
    with replica_routes("a", token=TOKEN) as url:
        right = sign(TOKEN, role=TRAINER, nonce=nonce, url=url)
        other_token = sign("other", role=TRAINER, nonce=nonce, url=url)
        other_role = sign(TOKEN, role=REPLICA, nonce=nonce, url=url)
        other_url = sign(TOKEN, role=TRAINER, nonce=nonce, url="http://127.0.0.1:1")
        expected = {right: 200, other_token: 401, other_role: 401, other_url: 401, "": 401}
        for proof, status in expected.items():
            assert _hello(url, {"nonce": nonce, "proof": proof}) == status
        assert _hello(url, {"nonce": "short", "proof": right}) == 401
        assert _hello(url, {"nonce": 1, "proof": right}) == 400
        assert _hello(url, {"nonce": nonce, "proof": "x" * 5000}) == 413


def _hello(url, value):
    with ConnectionPool() as pool:
        body = json.dumps(value).encode()
        answer = pool.request("POST", f"{url}/rl/hello", content=body)
    assert TOKEN.encode() not in answer.content
    # connections of strangers would use up all descriptors
    is_closed = (b"connection", b"close") in answer.headers
    assert is_closed == (answer.status != 200)
    return answer.status


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (None, TOKEN, "this replica has a token and the trainer has none"),
        (TOKEN, None, "this replica has no token and the trainer has one"),
        (TOKEN, "other", "the trainer has another token"),
        (TOKEN, TOKEN, ""),
        (None, None, ""),
    ],
)
def test_both_have_the_same_token_or_none(tmp_path, caplog, ours, theirs, text):
    with replica_routes("a", token=theirs) as url:
        announce(tmp_path, "a", url)
        arguments = {"count": 1, "timeout_s": 0.5, "token": ours}
        if not text:
            (entry,) = wait_until_announced(tmp_path, **arguments)
            assert entry["url"] == url
            return
        with caplog.at_level(logging.WARNING), pytest.raises(ReplicaDied, match=text):
            wait_until_announced(tmp_path, **arguments)
    (record,) = caplog.records
    assert text in record.getMessage() and "start both with the same MEGADIFF_TOKEN" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "http://[2001:db8::1]:80", "http://h:80"])
def test_off_loopback_a_token_is_needed(url):
    client = ReplicaClient(url, "a")
    with pytest.raises(NotProven, match="not on loopback .*; set MEGADIFF_TOKEN for the trainer"):
        client.prove()


def test_an_address_that_broke_proves_itself_again():
    """Another process may have the port by then."""
    with replica_routes("a", token=TOKEN) as url:
        client = client_of(url)
        client.weights_places()
    with Stranger(pretend, port=int(url.rpartition(":")[2])) as stranger:
        for _ in range(2):  # the idle connection broke, and then a new one is refused
            with pytest.raises(ReplicaError):
                client.weights_begin(1, {"transformer.weight": {}})
        assert {path for path, _, _ in stranger.asked} == {"/rl/hello"}
        assert not any("Authorization" in headers for _, headers, _ in stranger.asked)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_every_request_of_a_run_names_it(tmp_path, token):
    def prove(handler, body):
        nonce = json.loads(body or b"{}").get("nonce", "")
        proof = sign(TOKEN, role=REPLICA, nonce=nonce, url=stranger.url)
        answer = {"name": "a", "workers": [], "nonce": nonce, "proof": proof}
        reply(handler, json.dumps(answer).encode())

    with Stranger(prove) as stranger:
        announce(tmp_path, "a", stranger.url)
        for run in ("mine-0123abcd", ""):
            stranger.asked.clear()
            client = client_of(stranger.url, token=token, run=run)
            client.health()
            client.weights_places()
            client.weights_begin(1, {})
            with supervised(tmp_path, client, token=token, run=run, releases=True):
                pass
            named = [
                {name.lower(): value for name, value in headers.items()}.get(RUN_HEADER, "")
                for path, headers, _ in stranger.asked
                if path != "/rl/hello"  # before it the other is a stranger
            ]
            assert named == [run] * len(named)
            paths = [path for path, _, _ in stranger.asked]
            assert paths[-1] == "/rl/release" and ("/rl/hello" in paths) == bool(token)


def test_a_fleet_that_does_not_release_says_nothing():
    with Stranger(pretend) as stranger:
        with Fleet([ReplicaClient(stranger.url, "a")], batch_size=1):
            pass
        assert not stranger.asked


def test_a_release_that_hangs_holds_nobody(tmp_path):
    with Stranger(drip) as stranger, replica_routes("b") as url:
        clients = [ReplicaClient(stranger.url, "a"), ReplicaClient(url, "b")]
        for client in clients:
            announce(tmp_path, client.name, client.url)
        began = time.monotonic()
        with supervised(tmp_path, *clients, releases=True):
            pass  # b has no such route, or does: both are well
        assert time.monotonic() - began < 5


def test_a_run_says_that_it_lives_while_it_sends_nothing(tmp_path):
    """An update may take longer than the silence after which a replica is free."""
    heard = threading.Event()

    def answer(handler, body):
        if handler.headers.get(RUN_HEADER) == "mine" and handler.path == "/health":
            heard.set()
        reply(handler, b"{}")

    with Stranger(answer) as stranger:
        client = ReplicaClient(stranger.url, "r", run="mine")
        announce(tmp_path, "r", client.url)
        with supervised(tmp_path, client, releases=True):
            assert heard.wait(10)
        count = len(stranger.asked)
        time.sleep(0.2)
        assert len(stranger.asked) <= count + 1  # a closed fleet is silent


def test_a_push_waits_for_a_replica_whose_run_may_be_gone(monkeypatch, caplog):
    """A run that was killed gives nothing back; its replicas are free when it was silent."""
    monkeypatch.setattr(weight_target, "OWNER_SILENT_S", 0.5)
    monkeypatch.setattr(weight_target, "GIVE_UP_S", 2.5)  # an answer may be slow, too
    statuses = [423, 200, *[423] * 100]

    def answer(handler, body):
        reply(handler, b'{"error": "run a works with it"}', status=statuses.pop(0))

    with Stranger(answer) as stranger:
        with Fleet([ReplicaClient(stranger.url, "r", run="b")], batch_size=1) as fleet:
            (target,) = fleet.weight_targets()
            target.weights_begin(0, b"{}", lora=None, transport={"name": "http"})
            assert "run a works with it; waiting for it" in caplog.text
            with pytest.raises(ReplicaError, match="423: run a works with it"):
                target.weights_begin(0, b"{}", lora=None, transport={"name": "http"})
