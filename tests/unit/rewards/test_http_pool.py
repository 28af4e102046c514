"""Calls of the HTTP pool end as documented, within their deadline, whatever the servers do."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megadiff.rewards import http_pool
from megadiff.rewards.base import ScoreFailed
from megadiff.rewards.http_pool import HttpPool, check_urls
from tests.unit.rewards.fault_server import fault_server

pytestmark = pytest.mark.slow  # most of it waits for servers that do not answer

COMPLETIONS = "/v1/chat/completions"
READY = {"ready": True}
SILENT = ("hang", "drip")


@pytest.fixture
def make_pool(request):
    """(urls, **limits) → an HttpPool that is closed after the test."""

    def make(urls, *, timeout_s=1.2, deadline_s=1.5, **arguments):
        pool = HttpPool(urls, timeout_s=timeout_s, deadline_s=deadline_s, **arguments)
        request.addfinalizer(pool.close)
        return pool

    return make


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("fault", ["500", "429", "half", "hang", "drip", "html"])
def test_a_fault_that_passes_costs_a_retry(make_pool, fault):
    with fault_server(fault, times=1) as server:
        pool = make_pool(server.url, timeout_s=0.4 if fault in SILENT else 5, deadline_s=10)
        assert pool.post(COMPLETIONS, json={}) == READY
        assert pool.retries == len(server.asked) - 1 >= 1


def test_a_slow_server_is_waited_for(make_pool):
    with fault_server("slow") as server:
        pool = make_pool(server.url, timeout_s=5, deadline_s=5)
        assert pool.post(COMPLETIONS, json={}) == READY
        assert pool.retries == 0


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("500", "POST {url}/v1/chat/completions answered 500: .*because of the fault"),
        ("half", "POST {url}/v1/chat/completions failed: RemoteProtocolError"),
        ("hang", "POST {url}/v1/chat/completions had no whole answer within 0.[0-4] s"),
        ("drip", "POST {url}/v1/chat/completions had no whole answer within 0.[0-4] s"),
        ("html", "POST {url}/v1/chat/completions answered no JSON: .*<html>proxy error"),
    ],
)
def test_a_fault_that_stays_ends_at_the_deadline(make_pool, fault, cause):
    with fault_server(fault) as server:
        pool = make_pool(server.url, timeout_s=0.4 if fault in SILENT else 1.2)
        start_s = time.monotonic()
        gave_up = (
            rf"gave up after \d tries \(deadline_s=1.5, timeout_s=\S+ for each\); the last: {cause}"
        )
        with pytest.raises(ScoreFailed, match=gave_up.format(url=server.url)):
            pool.post(COMPLETIONS, json={})
        assert time.monotonic() - start_s < 10
        assert pool.retries == len(server.asked) - 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("422", "POST {url}/v1/chat/completions answered 422: .*because of the fault"),
        ("redirect", "POST {url}/v1/.* answered 307.*not followed.*http://127.0.0.1:1/elsewhere"),
        ("flood", "POST {url}/v1/chat/completions answers over .* bytes, its limit is 1000"),
    ],
)
def test_what_a_retry_would_not_change_is_asked_once(make_pool, fault, cause, monkeypatch):
    monkeypatch.setattr(http_pool, "MAX_BYTES", 1000)
    with fault_server(fault) as server:
        pool = make_pool(server.url)
        with pytest.raises(ScoreFailed, match=cause.format(url=server.url)):
            pool.post(COMPLETIONS, json={})
        assert len(server.asked) == 1


def test_nobody_listens(make_pool):
    url = f"http://127.0.0.1:{free_port()}"
    start_s = time.monotonic()
    with pytest.raises(ScoreFailed, match=rf"gave up after \d tries.*GET {url}/ failed: .*refused"):
        make_pool(url).get("/")
    assert time.monotonic() - start_s < 10


def test_a_server_that_starts_late_is_waited_for(make_pool):
    port = free_port()
    pool = make_pool(f"http://127.0.0.1:{port}", deadline_s=8)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pool.get, "/")
        time.sleep(0.5)
        with fault_server(port=port):
            assert answer.result() == READY
    assert pool.retries >= 1


def test_one_of_two_is_dead(make_pool):
    """It costs a retry once in two seconds, not one for each call."""
    with fault_server() as server:
        pool = make_pool([f"http://127.0.0.1:{free_port()}", server.url], deadline_s=10)
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(pool.post, COMPLETIONS, json={}) for _ in range(64)]
        assert all(answer.result() == READY for answer in answers)
        # the calls that began together, before any of them had failed
        assert pool.retries <= 8


def test_one_of_two_is_gone_for_good(make_pool):
    """Its answer is the quickest, and it must not draw the others' requests."""
    with fault_server("410") as gone, fault_server("slow") as server:
        pool = make_pool([gone.url, server.url], timeout_s=2, deadline_s=10)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: pool.post(COMPLETIONS, json={}), range(24)))
        assert all(answer == READY for answer in answers)
        assert len(gone.asked) <= 8
        with pytest.raises(ScoreFailed, match="answered 410"):
            make_pool(gone.url).post(COMPLETIONS, json={})


def test_one_of_two_hangs(make_pool, monkeypatch):
    """When its rest is over, one call tries it, and the others do not wait with that one."""
    monkeypatch.setattr(http_pool, "REST_S", 0.2)
    with fault_server() as server, fault_server("hang") as hanging:
        pool = make_pool([server.url, hanging.url], timeout_s=0.8, deadline_s=10)
        with ThreadPoolExecutor(8) as threads:
            # so that the calls of the next second come while it rests or is tried
            [threads.submit(pool.post, COMPLETIONS, json={}) for _ in range(8)]
        first = len(hanging.asked)
        end_s = time.monotonic() + 1.6
        while time.monotonic() < end_s:
            with ThreadPoolExecutor(8) as threads:
                answers = [threads.submit(pool.post, COMPLETIONS, json={}) for _ in range(8)]
            assert all(answer.result() == READY for answer in answers)
        assert len(hanging.asked) - first <= 3  # a try is 0.8 s, a rest 0.2 s


def test_a_call_that_failed_goes_to_another_server(make_pool, monkeypatch):
    """Even where the one that failed has rested, and is idle."""
    monkeypatch.setattr(http_pool, "REST_S", 0.0)
    monkeypatch.setattr(http_pool, "FIRST_PAUSE_S", 0.01)
    with fault_server() as server, fault_server("500") as bad:
        pool = make_pool([server.url, bad.url], timeout_s=5, deadline_s=10)
        for number in range(20):
            retries = pool.retries
            pool.post(COMPLETIONS, json={"number": number})
            assert pool.retries - retries <= 1
        assert bad.asked


def test_the_server_with_the_fewest_in_flight_is_asked(make_pool):
    with fault_server() as fast, fault_server("slow") as slow:
        pool = make_pool([fast.url, slow.url], timeout_s=10, deadline_s=10)
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(pool.post, COMPLETIONS, json={}) for _ in range(40)]
        assert all(answer.result() == READY for answer in answers)
        assert len(fast.asked) > 3 * len(slow.asked)


def test_close_ends_calls_that_wait(make_pool):
    with fault_server("hang") as server:
        pool = make_pool(server.url, timeout_s=60, deadline_s=60)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(pool.post, COMPLETIONS, json={})
            while not server.asked:
                time.sleep(0.01)
            start_s = time.monotonic()
            pool.close()
            with pytest.raises(ScoreFailed, match=r"gave up after 1 try \(closed\)"):
                call.result()
            assert time.monotonic() - start_s < 20


def test_no_proxy_and_the_headers_of_every_call(make_pool, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with fault_server() as server:
        pool = make_pool(f"{server.url}/", headers={"Authorization": "Bearer secret"})
        pool.get("/", url=server.url)
        pool.post(COMPLETIONS, content=b"abc")
    assert [(path, headers["Authorization"]) for path, headers, _ in server.asked] == [
        ("/", "Bearer secret"),
        (COMPLETIONS, "Bearer secret"),
    ]
    assert server.asked[1][2] == b"abc"


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_https(make_pool, tmp_path, monkeypatch, caplog):
    """The certificate is checked, and the deadline holds over TLS as well."""
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        + ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        + ["-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with fault_server("drip", tls=tls) as server:
        url = server.url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(ScoreFailed):
            make_pool(url).get("/")
        assert "self-signed certificate" in caplog.text
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert make_pool(url, timeout_s=10, deadline_s=10).get("/") == READY
        with pytest.raises(ScoreFailed, match="had no whole answer within"):
            make_pool(url).post(COMPLETIONS, content=bytes(5_000_000))


def test_idle_connections_close_before_the_server_closes_them():
    assert http_pool.KEEP_ALIVE_S < 5  # uvicorn's


def test_no_threads_of_its_own(make_pool):
    before = threading.active_count()
    make_pool("http://127.0.0.1:1")
    assert threading.active_count() == before


def test_urls():
    assert check_urls("http://gpu7:9000/") == ["http://gpu7:9000"]
    assert check_urls(["https://a.org/v1", "http://[::1]:80", "https://a.org/v1/"]) == [
        "https://a.org/v1",
        "http://[::1]:80",
    ]


@pytest.mark.parametrize(
    "url",
    ["", "gpu7:9000", "ftp://a", "http://", "http://a:70000", "http://a:0", "http://u:p@a", 7]
    + ["http://a?x=1", "http://a b", "http://ä", "http://a\n"],
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="is no base URL of a server; give http://host:port"):
        check_urls([url])


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="url has 0 servers, need at least 1"):
        HttpPool([])
    with pytest.raises(ValueError, match="timeout_s=60 .* deadline_s=10 .* need 0 < timeout_s <="):
        HttpPool("http://a", timeout_s=60, deadline_s=10)
