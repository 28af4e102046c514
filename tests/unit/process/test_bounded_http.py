"""Answers that are too slow or too large end in time, whatever is slow or large about them."""

import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpcore
import pytest

from megadiff.process.bounded_http import (
    AnswerTooLarge,
    AnswerTooLate,
    BoundedHttp,
    NoAnswer,
    _DeadlineStream,
)
from tests.unit.process.strangers import Stranger, drip, drip_headers, flood, reply


def ask(url, *, timeout_s=0.5, max_bytes=1000, **arguments):
    http = BoundedHttp(url)
    try:
        return http.request(
            "POST", "/x", headers={}, timeout_s=timeout_s, max_bytes=max_bytes, **arguments
        )
    finally:
        http.close()


@pytest.mark.parametrize("slow", [drip, drip_headers, lambda handler, body: time.sleep(60)])
def test_the_time_is_for_the_whole_answer(slow):
    with Stranger(slow) as stranger:
        start_s = time.monotonic()
        with pytest.raises(AnswerTooLate, match=r"POST http://.*/x had no whole answer within 0"):
            ask(stranger.url)
        assert time.monotonic() - start_s < 10


def test_a_body_without_end_is_not_read():
    with Stranger(flood) as stranger:
        with pytest.raises(AnswerTooLarge, match=r"over \d+ bytes, its limit is 1000"):
            ask(stranger.url, timeout_s=20)


def test_a_length_over_the_limit_is_refused_before_it_is_read():
    def boast(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(10**15))
        handler.end_headers()
        time.sleep(5)

    with Stranger(boast) as stranger:
        start_s = time.monotonic()
        with pytest.raises(AnswerTooLarge, match=f"answers {10**15} bytes, its limit is 1000"):
            ask(stranger.url, timeout_s=20)
        assert time.monotonic() - start_s < 4


def test_answers_within_the_limits_come_whole():
    """Refusals as well: a status is the caller's to judge. Connections are used again."""
    body = bytes(range(256)) * 4096
    with Stranger(lambda handler, sent: reply(handler, sent, status=409)) as stranger:
        http = BoundedHttp(stranger.url)
        for content in (body, b""):
            answer = http.request(
                "POST", "/x", headers={}, content=content, timeout_s=20, max_bytes=len(body)
            )
            assert (answer.status, answer.content_type) == (409, "application/json")
            assert answer.body == content
        http.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no..name:80"])
def test_an_address_that_cannot_be_reached(url):
    with pytest.raises(NoAnswer, match=f"POST {url}/x failed"):
        ask(url, timeout_s=20)


def test_a_broken_connection():
    def hang_up(handler, body):
        handler.close_connection = True

    with Stranger(hang_up) as stranger:
        with pytest.raises(NoAnswer):
            ask(stranger.url)


class SlowToWake(httpcore.NetworkStream):
    """A stream whose reader sees only on wake_up() that its socket was shut down."""

    def __init__(self):
        self.deeds = []
        self.is_reading = threading.Event()
        self.wake_up = threading.Event()
        self.socket, self._other = socket.socketpair()

    def read(self, max_bytes, timeout=None):
        self.is_reading.set()
        assert self.wake_up.wait(20)
        self.deeds.append("read ends")
        return b""

    def write(self, buffer, timeout=None):
        self.deeds.append("write")

    def close(self):
        self.deeds.append("descriptor is free")
        self.socket.close()
        self._other.close()

    def get_extra_info(self, info):
        return self.socket


def test_a_descriptor_stays_as_long_as_a_thread_waits_in_it():
    """Its number could be another socket's, and the thread would wait there till its deadline."""
    inner = SlowToWake()
    stream = _DeadlineStream(inner, secured=lambda stream, _: stream)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.read, 100, time.monotonic() + 20)
        assert inner.is_reading.wait(20)
        stream.close()
        assert not inner.deeds
        inner.wake_up.set()
        assert reading.result() == b""
    assert inner.deeds == ["read ends", "descriptor is free"]


def test_a_closed_stream_is_not_used_again():
    inner = SlowToWake()
    stream = _DeadlineStream(inner, secured=lambda stream, _: stream)
    stream.close()
    with pytest.raises(httpcore.WriteError, match="closed"):
        stream.write(b"x", time.monotonic() + 20)
    with pytest.raises(httpcore.ReadError, match="closed"):
        stream.read(100, time.monotonic() + 20)
    assert inner.deeds == ["descriptor is free"]


def test_certificates_are_read_once_for_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where a session has set SSL_CERT_FILE meanwhile."""
    num_read = []

    def read() -> ssl.SSLContext:
        num_read.append(1)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    monkeypatch.setattr(httpcore, "default_ssl_context", read)
    for file in ("/one.pem", "/other.pem"):
        monkeypatch.setenv("SSL_CERT_FILE", file)
        for port in range(1, 4):
            BoundedHttp(f"https://127.0.0.1:{port}").close()
    BoundedHttp("http://127.0.0.1:1").close()
    assert len(num_read) == 2
