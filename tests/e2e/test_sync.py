"""Every transport to real replicas, one of which has two tensor-parallel workers: whole pushes, and
pushes that break.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from bench_sync_faults import JOIN_S, open_trials
from sync_faults import ALL, KINDS
from sync_injector import Injector
from tiny_replicas import PAIR

from megadiff.parallel.collectives import AgreedError
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.sync.transports import group_join
from megadiff.sync.transports.table import OPTIONS
from megadiff.types import LoraSpec, Prompt, RolloutRequest, Sampling
from tests.e2e.pushes import Source, buckets_left, folder_weights, sync_between, urls_of
from tests.e2e.servers import ROOT, start_replicas, stop
from tests.lora_tensors import merged, random_lora

REQUEST = RolloutRequest(
    prompt=Prompt(text="a red cat", id="ab" * 8),
    sampling=Sampling(height=64, width=64, num_inference_steps=6, sde_window_range=(0, 5)),
    sample_indices=(0, 1, 2),
    seed=3,
    step=0,
)


@pytest.fixture(scope="module")
def source(tiny_model) -> Source:
    return Source(folder_weights(tiny_model, ("transformer",)))


@pytest.fixture(scope="module")
def sync_to(source, tiny_model, registry):
    """A context: the sync of a transport to replicas, name → url."""
    folder = registry.parent / "weights"
    return lambda transport, urls, **settings: sync_between(
        source, urls, transport, model=tiny_model, folder=folder, **settings
    )


@pytest.fixture(scope="module")
def singles(registry) -> dict[str, str]:
    """name → url of the shared replicas."""
    return urls_of(registry)


@pytest.fixture(scope="module")
def injector(tmp_path_factory, registry) -> Injector:
    return Injector(registry.parent / "weights", tmp_path_factory.mktemp("fault") / "fault")


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory, tiny_model, registry, singles, sync_to, source, injector
) -> Iterator[tuple[list, str]]:
    """(server processes, url) of a replica with two workers, which joins after version 5 was pushed
    by disk. The workers mix things up where the injector says so.
    """
    source.factor = 1.5
    with sync_to("disk", singles) as (sync, _):
        sync.push(5)
    folder = tmp_path_factory.mktemp("pair")
    script = str(ROOT / "tools" / "faulty_worker.py")
    command = [script, str(injector.fault_file), str(tiny_model)]
    command += ["--dtype", "float32", "--device", "cpu", "--tp", "2"]
    command += ["--weights", str(registry.parent / "weights")]
    servers = start_replicas(1, folder=folder, command=command)
    yield servers, json.loads((folder / "registry" / "replica_0.json").read_text())["url"]
    stop(servers)


@pytest.fixture(scope="module")
def urls(singles, pair) -> dict[str, str]:
    return singles | {"pair": pair[1]}


def test_a_late_joiner_has_the_newest_version(sync_to, urls):
    """It verified that before it announced itself; the other two hold what was pushed."""
    with sync_to("http", urls) as (_, fleet):
        assert [client.health()["policy_version"] for client in fleet.replicas] == [5, 5, 5]
        one, _, late = (fleet.generate_on(place, [REQUEST])[0] for place in range(3))
        assert (one.latents_GSLC - late.latents_GSLC).abs().max() <= 1e-5


@pytest.mark.parametrize("transport", OPTIONS)
def test_a_push_by_every_transport(sync_to, urls, source, transport):
    """Two pushes; what is held is compared in WeightSync itself.

    The replica of two workers samples what the others do.
    """
    with sync_to(transport, urls) as (sync, fleet):
        groups = {}
        for version in (1, 2):
            source.factor = 1.0 + version / 64
            sync.push(version)
            assert sync.seconds["fingerprint"] > 0
            groups[version] = [fleet.generate_on(place, [REQUEST])[0] for place in range(3)]
            assert {group.policy_version for group in groups[version]} == {version}
    for one, same, two_workers in groups.values():
        assert torch.equal(one.latents_GSLC, same.latents_GSLC)
        assert (one.latents_GSLC - two_workers.latents_GSLC).abs().max() <= 1e-5
        assert (one.log_probs_GW - two_workers.log_probs_GW).abs().max() <= 1e-5
    assert not torch.equal(groups[1][0].latents_GSLC[0], groups[2][0].latents_GSLC[0])
    assert not buckets_left()


@pytest.fixture
def adapter(source) -> Iterator[LoraSpec]:
    """Makes the source one with LoRA on linears of every kind, one slice of a fused one left out;
    alpha is not the rank.
    """
    layers = (
        "attn.to_q",
        "attn.to_v",
        "attn.add_k_proj",
        "attn.to_out.0",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
    )
    modules = sorted(
        f"transformer_blocks.{block}.{layer}" for block in range(2) for layer in layers
    )
    source.factor, source.lora = 1.0, LoraSpec(rank=3, alpha=4.0, modules=tuple(modules))
    yield source.lora
    source.lora, source.adapter, source.factor = None, {}, 1.0


@pytest.mark.parametrize("transport", OPTIONS)
def test_lora_by_every_transport(sync_to, urls, source, adapter, transport):
    """The base once, then the adapter alone; live adapters sample as merged weights do, on two
    workers too.
    """
    with sync_to(transport, urls) as (sync, fleet):
        sizes = []
        for version in (1, 2):
            source.adapter = random_lora(source.weights, adapter, seed=version)
            sizes.append(round(sync.push(version)["sync/gib"] * 2**30))
            live = [fleet.generate_on(place, [REQUEST])[0] for place in range(3)]
        assert sizes[1] == sum(tensor.nbytes for tensor in source.adapter.values())
        assert sizes[0] == sizes[1] + sum(tensor.nbytes for tensor in source.weights.values())
        sync.engine = Source(merged(source.weights, source.adapter, adapter))
        sync.push(3)
        whole = fleet.generate_on(0, [REQUEST])[0]
    for group in live:
        assert (group.latents_GSLC - whole.latents_GSLC).abs().max() <= 1e-5
        assert (group.log_probs_GW - whole.log_probs_GW).abs().max() <= 1e-5
        # of 255, where it rounds
        assert (group.pixels_GFHWC.int() - whole.pixels_GFHWC.int()).abs().max() <= 1


def test_a_replica_that_lost_its_base_gets_it_again(sync_to, urls, source, adapter):
    source.adapter = random_lora(source.weights, adapter, seed=1)
    with sync_to("http", urls) as (sync, fleet):
        sync.push(1)
        ReplicaClient(urls["replica_1"], "replica_1").weights_begin(
            7, sync.manifest
        )  # another push, broken off
        with pytest.raises(
            AgreedError,
            match="replica_1 .*the push leaves out transformer, which this replica does not hold",
        ):
            sync.push(2)
        sizes = sync.push(3)
        assert sizes["sync/gib"] * 2**30 > sum(tensor.nbytes for tensor in source.weights.values())
        assert fleet.generate_on(1, [REQUEST])[0].policy_version == 3


class Proxy:
    """Stands between the trainer and a replica.

    cut_at: the bucket (from 0) in whose request the connection breaks.
    """

    def __init__(self, url: str, *, cut_at: int) -> None:
        self.target = (urlsplit(url).hostname, urlsplit(url).port)
        self.left = cut_at
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_request and b"POST /rl/weights/bucket" in data:
                    self.left -= 1
                    if self.left < 0:
                        sink.sendall(data[: len(data) // 2])
                        break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("transport", OPTIONS)
def test_a_connection_that_is_cut_in_a_bucket(sync_to, urls, source, transport):
    """A clear error within seconds; no replica generates from a mixture; the next whole push
    heals.
    """
    source.factor = 1.25
    proxy = Proxy(urls["replica_0"], cut_at=1)
    start = time.monotonic()
    with sync_to(transport, urls | {"replica_0": proxy.url}) as (sync, fleet):
        with pytest.raises(AgreedError, match="replica_0 at http://127.0.0.1:.* does not answer"):
            sync.push(3)
        assert time.monotonic() - start < 15
        for client in fleet.replicas[1:]:
            with pytest.raises(
                ReplicaError, match="version 3 is being pushed .* and is not committed"
            ):
                client.generate(REQUEST)
        proxy.left = 1000
        sync.push(3)  # by the same sync, which builds its group anew
        groups = [fleet.generate_on(place, [REQUEST])[0] for place in (0, 1)]
        assert torch.equal(groups[0].latents_GSLC, groups[1].latents_GSLC)
    proxy.listener.close()
    assert not buckets_left()


def test_a_fault_of_each_kind_by_each_transport(singles, pair, injector, tiny_model, monkeypatch):
    """In whole pushes and in those of LoRA: some trials of tools/bench_sync_faults.py."""
    # turns of all kinds: two transports with whole pushes, the other two with LoRA's
    turns = (0, 1, len(ALL) + 2, len(ALL) + 3)
    numbers = [turn * len(KINDS) + kind for turn in turns for kind in range(len(KINDS))]
    monkeypatch.setattr(group_join, "JOIN_S", JOIN_S)
    with ExitStack() as stack:
        trials = open_trials(tiny_model, singles | {PAIR: pair[1]}, injector, stack)
        lines = [trials.run(number, "0") for number in numbers]
    tally = trials.tally
    assert not tally.missed, "\n".join([*tally.missed, *lines])
    tried = {(kind, transport) for kind, transport, _ in tally.counts}
    assert len(tried) == len(KINDS) * len(ALL)
    assert tally.num("found") > len(lines) / 2, "\n".join(lines)
    assert not buckets_left()


def test_a_replica_that_is_stopped_in_a_push_is_lost_and_no_other(sync_to, urls, pair, source):
    """Its bucket gives up before the heartbeat does: nobody knows then whose fault it is."""
    source.factor = 1.0625
    servers, _ = pair
    leader = psutil.Process(servers[0].pid)
    stopped = [leader, *leader.children(recursive=True)]

    def stop(number: int) -> None:
        for process in stopped if number == 2 else []:
            process.suspend()

    with sync_to("nccl", urls, heartbeat_s=4.0) as (sync, fleet):
        sync.push(6)
        source.factor, source.on_bucket = 1.03125, stop
        sync.transport.timeout_s = 1.0
        try:
            with pytest.raises(AgreedError, match="pair at http://127.0.0.1:.* does not answer"):
                sync.push(7)
            assert fleet.lost.keys() == {urls["pair"]}
        finally:
            source.on_bucket = lambda number: None
            for process in stopped:
                process.resume()


def test_a_replica_that_is_killed_in_a_push(sync_to, urls, singles, pair, source):
    """The last test, as it takes a replica away.

    It is named, nothing hangs, and the others are healed without it.
    """
    source.factor = 1.125
    servers, _ = pair
    source.on_bucket = lambda number: servers[0].kill() if number == 2 else None
    start = time.monotonic()
    with (
        sync_to("nccl", urls) as (sync, _),
        pytest.raises(AgreedError, match="pair at http://127.0.0.1:.* does not answer"),
    ):
        sync.push(8)
    assert time.monotonic() - start < 15
    source.on_bucket = lambda number: None
    with sync_to("nccl", singles) as (sync, fleet):
        for client in fleet.replicas:
            with pytest.raises(ReplicaError, match="version 8 is being pushed"):
                client.generate(REQUEST)
        sync.push(9)
        assert [client.generate(REQUEST).policy_version for client in fleet.replicas] == [9, 9]
