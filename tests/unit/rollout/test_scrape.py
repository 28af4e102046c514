"""What a replica says of its work: /metrics, /health and the header of an answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from fastapi import FastAPI
from prometheus_client import REGISTRY, Counter
from prometheus_client.parser import text_string_to_metric_families

from megadiff.models.pipeline_base import GPU_BYTES, WAS_PREPARED
from megadiff.models.pipeline_stop import ALIVE_NAME
from megadiff.process.versions import sampling_code
from megadiff.rollout.limits import OUTSTANDING_HEADER
from megadiff.rollout.server import replica as replica_module
from megadiff.rollout.server.load import Load
from megadiff.rollout.server.progress import MAX_SHAPES, NEW_SHAPE_S, EngineProgress
from megadiff.rollout.server.replica import Replica
from megadiff.sync.bucket import bucket_manifest
from tests.unit.rollout.served import serving
from tests.unit.rollout.test_doors import REQUEST
from tests.waiting import wait_for

TOKEN = "a-token-of-some-length"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
BUCKET = [("transformer.a", torch.randn(30))]


class SlowEngine:
    """A replica whose calls wait until they are let go, one at a time."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.waits = threading.Semaphore(0)
        self.result = {
            GPU_BYTES: torch.tensor([3 * 2**30, 2**32]),
            WAS_PREPARED: torch.tensor(True),
        }

    def put(self, replica: Replica, app: FastAPI) -> None:
        self.replica = replica
        queue = asyncio.Lock()

        async def sample(requests: object, stop: object) -> dict:
            async with queue:
                await asyncio.to_thread(self.waits.acquire)
                if self.result is None:
                    raise RuntimeError("the worker died")
                return self.result

        replica._sample = sample  # type: ignore[method-assign]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SlowEngine:
    monkeypatch.setattr(replica_module, "split_groups", lambda *_, **__: [])
    monkeypatch.setattr(replica_module, "encode_groups", lambda groups: b"groups")
    return SlowEngine()


@pytest.fixture
def url(engine: SlowEngine, tmp_path: Path) -> Iterator[str]:
    manifest = bucket_manifest(BUCKET)
    with serving(manifest, tmp_path, name="replica_3", token=TOKEN, change=engine.put) as url:
        yield url


def scraped(url: str) -> dict[str, float]:
    """Every sample of the answer, name and labels → value."""
    answer = httpx.get(f"{url}/metrics", headers=AUTHORIZED)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    figures = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = "".join(f" {name}={value}" for name, value in sample.labels.items())
            figures[sample.name + labels] = sample.value
    return figures


def ask(url: str, num_samples: int, answers: list[httpx.Response]) -> threading.Thread:
    request = REQUEST | {"policy_version": -1, "sample_indices": list(range(num_samples))}

    def call() -> None:
        arguments = {"json": [request], "headers": AUTHORIZED, "timeout": 30}
        answers.append(httpx.post(f"{url}/rl/generate", **arguments))

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_replica_counts_what_runs_and_what_waits(url: str, engine: SlowEngine) -> None:
    before = scraped(url)
    assert before["megadiff_samples_drawn_total"] == before["megadiff_samples_outstanding"] == 0
    assert before["megadiff_calls_running"] == before["megadiff_calls_waiting"] == 0
    assert before["megadiff_replica_info replica=replica_3 run="] == 1
    assert before["megadiff_policy_version"] == -1
    assert before["megadiff_state state=ready"] == 1 and before["megadiff_state state=asleep"] == 0
    assert before["process_resident_memory_bytes"] > 1e6
    assert before["megadiff_workers_resident_bytes"] >= 0
    assert "megadiff_owner_silent_seconds" not in before
    assert "megadiff_gpu_allocated_bytes" not in before

    answers: list[httpx.Response] = []
    threads = [ask(url, 4, answers), ask(url, 2, answers)]
    wait_for(lambda: engine.replica.load.num_calls == 2)
    busy = scraped(url)
    assert (busy["megadiff_calls_running"], busy["megadiff_calls_waiting"]) == (1, 1)
    assert busy["megadiff_samples_outstanding"] == 6
    health = httpx.get(f"{url}/health").json()
    assert (health["in_flight"], health["outstanding"]) == (2, 6)
    assert health["arithmetic"]["code"] == sampling_code()

    engine.waits.release()
    wait_for(lambda: len(answers) == 1)
    assert scraped(url)["megadiff_calls_running"] == 1
    engine.waits.release()
    for thread in threads:
        thread.join()
    # The samples of the other call, in whichever order the two came; then none.
    left = [int(answer.headers[OUTSTANDING_HEADER]) for answer in answers]
    assert left[0] in (2, 4) and left[1] == 0
    timings = [answer.headers["server-timing"] for answer in answers]
    queued_ms = [float(text.partition("queue;dur=")[2]) for text in timings]
    assert queued_ms[0] == 0 < queued_ms[1]

    after = scraped(url)
    assert after["megadiff_samples_drawn_total"] == 6
    assert after["megadiff_calls_prepared_total"] == 2
    assert after["megadiff_samples_outstanding"] == 0
    assert after["megadiff_drawing_seconds_total"] > busy["megadiff_drawing_seconds_total"]
    assert after["megadiff_gpu_allocated_bytes"] == 3 * 2**30
    assert after["megadiff_gpu_reserved_bytes"] == 2**32


def test_a_failed_call_is_not_drawn_and_waits_no_more(url: str, engine: SlowEngine) -> None:
    engine.result = None
    engine.waits.release()
    answers: list[httpx.Response] = []
    ask(url, 4, answers).join()
    assert answers[0].status_code == 500
    figures = scraped(url)
    assert figures["megadiff_samples_drawn_total"] == figures["megadiff_samples_outstanding"] == 0


def test_an_engine_is_silent_when_a_call_takes_longer_than_one_before(
    url: str, engine: SlowEngine, tmp_path: Path
) -> None:
    """A first call may compile. Later ones end with the pixels, of which no pass tells."""

    def silent_s() -> float:
        return httpx.get(f"{url}/health").json()["engine_silent_s"]

    answers: list[httpx.Response] = []
    first = ask(url, 4, answers)
    wait_for(lambda: engine.replica.load.num_calls == 1)
    time.sleep(0.5)
    assert silent_s() == 0
    engine.waits.release()
    first.join()
    assert silent_s() == 0

    second = ask(url, 4, answers)
    wait_for(lambda: engine.replica.load.num_calls == 1)
    assert silent_s() == 0
    time.sleep(0.8)
    assert 0 < silent_s() < 0.8
    (tmp_path / ALIVE_NAME).touch()  # a pass
    assert silent_s() == 0
    engine.waits.release()
    second.join()


def test_a_first_call_of_a_shape_excuses_others_until_it_must_have_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of another size is drawn, a run's call waits behind it, and one fails at once."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = EngineProgress(tmp_path)
    with progress.drawing("known") as note_samples:
        now[0] += 5
        note_samples()
    with progress.drawing("image"):
        pass  # it is refused
    with progress.drawing("image"), progress.drawing("known"):
        now[0] += NEW_SHAPE_S - 1
        assert progress.silent_s() == 0
        now[0] += 2
        assert progress.silent_s() == NEW_SHAPE_S + 1 - 5


def test_shapes_are_forgotten_that_were_drawn_longest_ago(tmp_path: Path) -> None:
    """Not the run's own, which it draws again and again between images of any guidance."""
    progress = EngineProgress(tmp_path)
    for guidance in range(2 * MAX_SHAPES):
        for shape in ("run", guidance):
            with progress.drawing(shape) as note_samples:
                note_samples()
    assert len(progress._shape_s) == MAX_SHAPES
    assert {"run", 2 * MAX_SHAPES - 1} < progress._shape_s.keys()


def test_a_clock_that_jumps_is_no_silence(
    url: str, engine: SlowEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[httpx.Response] = []
    for _ in range(2):
        call = ask(url, 4, answers)
        wait_for(lambda: engine.replica.load.num_calls == 1)
        (tmp_path / ALIVE_NAME).touch()
        for jump_s in (200.0, -400.0):
            now_s = time.time() + jump_s
            monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
            assert httpx.get(f"{url}/health").json()["engine_silent_s"] < 5
            monkeypatch.undo()
        engine.waits.release()
        call.join()


def test_metrics_need_the_token_and_are_no_sign_of_life(url: str, engine: SlowEngine) -> None:
    for headers in ({}, {"Authorization": "Bearer another-token-entirely"}):
        answer = httpx.get(f"{url}/metrics", headers=headers)
        assert answer.status_code == 401 and "Authorization: Bearer" in answer.text

    engine.replica.owner.take("run-a")
    engine.replica.owner._heard_s -= 30
    assert scraped(url)["megadiff_owner_silent_seconds"] >= 30
    assert scraped(url)["megadiff_replica_info replica=replica_3 run=run-a"] == 1


def test_figures_of_vllm_are_elsewhere(url: str) -> None:
    """They are in the library's default registry, which this process shares with vLLM."""
    counter = Counter("vllm_something", "…")
    try:
        assert not any("vllm" in name for name in scraped(url))
    finally:
        REGISTRY.unregister(counter)


def test_time_counts_once_however_many_calls_wait() -> None:
    now_s = 0.0
    load = Load(lambda: now_s)
    with load.drawing(3):
        now_s = 2.0
        with load.drawing(5):
            assert (load.num_calls, load.num_running, load.num_samples) == (2, 1, 8)
            now_s = 3.0
        assert load.busy_s == 3.0
    now_s = 10.0
    assert (load.busy_s, load.num_calls, load.num_running) == (3.0, 0, 0)
    with pytest.raises(KeyError), load.drawing(1):
        now_s = 11.0
        raise KeyError
    assert load.busy_s == 4.0 and load.num_samples == 0
