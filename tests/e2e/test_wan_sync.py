"""A model of two experts pushed to real replicas, one of which has two tensor-parallel workers:
whole, and by parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megadiff.config.schema import LoraConfig
from megadiff.models.wan22.plan import PLAN
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.lora import lora_spec
from megadiff.sync.transports.table import OPTIONS
from megadiff.types import LoraSpec, Prompt, RolloutGroup, RolloutRequest, Sampling
from tests.e2e.pushes import Source, buckets_left, folder_weights, sync_between, urls_of
from tests.e2e.servers import start_replicas, stop
from tests.lora_tensors import merged, random_lora

EXPERTS = ("transformer", "transformer_2")
REQUEST = RolloutRequest(  # steps 0 to 2 are the high-noise expert's, 3 to 5 the low-noise one's
    prompt=Prompt(text="a red circle", id="ab" * 8),
    sampling=Sampling(
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=6,
        sde_window_size=5,
        sde_window_range=(0, 5),
    ),
    sample_indices=(0, 1),
    seed=3,
    step=0,
)


@pytest.fixture(scope="module")
def model(tiny_wan: dict[str, Path]) -> Path:
    return tiny_wan["t2v_a14b"]


@pytest.fixture
def source(model: Path) -> Source:
    return Source(folder_weights(model, EXPERTS))


@pytest.fixture(scope="module")
def folder(wan_registries: dict[str, Path]) -> Path:
    """Of transport disk."""
    return wan_registries["t2v_a14b"].parent / "weights"


@pytest.fixture(scope="module")
def single(wan_registries: dict[str, Path]) -> dict[str, str]:
    return urls_of(wan_registries["t2v_a14b"])


@pytest.fixture(scope="module")
def urls(
    model: Path, folder: Path, single: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """name → url of a replica with one worker and of one with two, which joins after one expert was
    pushed as version 5 and the other as version 6, by disk.
    """
    source = Source(folder_weights(model, EXPERTS))
    with sync_between(source, single, "disk", model=model, folder=folder) as (sync, _):
        source.factor = 1.25
        sync.push(5)
        source.factor, source.changed = 1.5, {"transformer_2"}
        sync.push(6)
    place = tmp_path_factory.mktemp("pair")
    command = ["-m", "megadiff.cli.serve", str(model), "--dtype", "float32", "--tp", "2"]
    servers = start_replicas(1, folder=place, command=[*command, "--weights", str(folder)])
    yield {**single, "pair": urls_of(place / "registry")["replica_0"]}
    stop(servers)


def draw(fleet, place: int) -> RolloutGroup:
    return fleet.generate_on(place, [REQUEST])[0]


def gap(one: RolloutGroup, other: RolloutGroup, *, steps: slice = slice(None)) -> float:
    """Largest difference of the states before, between and after the window's steps."""
    return float((one.latents_GSLC - other.latents_GSLC)[:, steps].abs().max())


def gib(tensors: dict[str, torch.Tensor], component: str) -> float:
    return (
        sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(f"{component}."))
        / 2**30
    )


def test_a_late_joiner_takes_each_part_from_the_version_that_holds_it(
    urls, source, model, folder
) -> None:
    """It verified that before it announced itself."""
    with sync_between(source, urls, "http", model=model, folder=folder) as (_, fleet):
        assert [client.health()["policy_version"] for client in fleet.replicas] == [6, 6]
        assert gap(draw(fleet, 0), draw(fleet, 1)) <= 1e-5


@pytest.mark.parametrize("transport", OPTIONS)
def test_only_the_expert_that_changed_travels(urls, source, model, folder, transport: str) -> None:
    """Whole, then one expert, then the other; WeightSync compares the fingerprints of both after
    each push. The expert in charge of a step is the one that shows in it.
    """
    with sync_between(source, urls, transport, model=model, folder=folder) as (sync, fleet):
        sent, groups = [], []
        for version, changed in enumerate(
            (set(EXPERTS), {"transformer_2"}, {"transformer"}), start=1
        ):
            source.changed, source.factor = changed, 1 + version / 16
            sent.append(sync.push(version)["sync/gib"])
            groups.append([draw(fleet, place) for place in (0, 1)])
            assert {group.policy_version for group in groups[-1]} == {version}
    sizes = [gib(source.weights, component) for component in EXPERTS]
    assert sent == pytest.approx([sum(sizes), sizes[1], sizes[0]])
    for one, two_workers in groups:
        assert gap(one, two_workers) <= 1e-5
    first, low, high = (one for one, _ in groups)
    assert gap(first, low, steps=slice(4)) == 0 and gap(first, low, steps=slice(4, 5)) > 1e-4
    assert gap(low, high, steps=slice(1)) == 0 and gap(low, high, steps=slice(1, 2)) > 1e-4
    assert not buckets_left()


@pytest.fixture
def lora(source: Source) -> LoraSpec:
    """On every linear that the plan names, of both experts."""
    names = (name.partition(".")[2] for name in source.weights if name.startswith("transformer."))
    source.lora = lora_spec(LoraConfig(rank=3, alpha=4), PLAN, names)
    return source.lora


@pytest.mark.parametrize("transport", OPTIONS)
def test_lora_of_both_experts(urls, source, lora: LoraSpec, model, folder, transport: str) -> None:
    """The base once, then the adapters of the expert that changed; live ones sample as merged
    weights do.
    """
    with sync_between(source, urls, transport, model=model, folder=folder) as (sync, fleet):
        sent = []
        for version, changed in enumerate(
            (set(EXPERTS), {"transformer_2"}, {"transformer"}), start=1
        ):
            newer = random_lora(source.weights, lora, seed=version)
            newer = {
                name: tensor for name, tensor in newer.items() if name.partition(".")[0] in changed
            }
            source.adapter, source.changed = source.adapter | newer, changed
            sent.append(sync.push(version)["sync/gib"])
            live = [draw(fleet, place) for place in (0, 1)]
        whole = Source(merged(source.weights, source.adapter, lora))
        sync.engine = whole
        sync.push(4)
        expected = draw(fleet, 0)
        base = Source(source.weights)
        sync.engine = base
        sync.push(5)
        without = draw(fleet, 0)
    adapters = [gib(source.adapter, component) for component in EXPERTS]
    everything = sum(gib(source.weights, component) for component in EXPERTS) + sum(adapters)
    assert sent == pytest.approx([everything, adapters[1], adapters[0]])
    for group in live:
        assert gap(group, expected) <= 1e-5
    assert gap(expected, without, steps=slice(1, 2)) > 1e-3  # the adapters show


def test_an_expert_that_is_not_what_was_sent_is_found(urls, source, model, folder) -> None:
    """Of the expert that this push leaves as it was: another trainer has changed it meanwhile."""
    with sync_between(source, urls, "http", model=model, folder=folder) as (sync, _):
        sync.push(1)
        other = Source({name: tensor * 2 for name, tensor in source.weights.items()})
        with sync_between(other, urls, "http", model=model, folder=folder) as (stranger, _):
            stranger.push(2)
        source.changed = {"transformer_2"}
        with pytest.raises(
            AgreedError,
            match="holds .* tensors with other bits than were sent: transformer.blocks.0",
        ):
            sync.push(3)
        sync.push(4)  # everything
