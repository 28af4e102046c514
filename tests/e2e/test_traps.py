"""The silent traps of vllm-omni: each is still there, and megadiff turns it into an error or does
the right thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from megadiff.config.schema import MAX_LORA_RANK
from megadiff.sync.sync import SentFingerprints
from megadiff.sync.transports.base import SyncError
from megadiff.tensors.fingerprint import fingerprints
from megadiff.tensors.lora_names import LORA_B
from megadiff.types import LoraSpec
from tests.e2e.trap_engine import TrapEngine, trap_engine
from tests.lora_tensors import Tensors, expected_prints, linears, merged, random_lora


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[TrapEngine]:
    with trap_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> Tensors:
    """The weights on disk, under the names that a push uses."""
    files = (tiny_model / "transformer").glob("*.safetensors")
    return {
        f"transformer.{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


@pytest.fixture
def engine(running: TrapEngine, base: Tensors) -> Iterator[TrapEngine]:
    """Hands the engine on with the weights on disk and no LoRA, its layers wrapped or not."""
    yield running
    running.call("push", base, None)


@pytest.fixture(scope="module")
def spec(base: Tensors) -> LoraSpec:
    """Every linear of the blocks but for one slice of a fused one; alpha / rank is no power of
    two.
    """
    modules = tuple(name for name in linears(base) if name != "transformer_blocks.1.attn.to_k")
    return LoraSpec(rank=3, alpha=5.0, modules=modules)


def used(engine: TrapEngine) -> dict[str, str]:
    return fingerprints(engine.call("used"))


def with_component(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"transformer.{module}" for module in modules)


def test_pushed_lora_computes_as_merged_weights_do(
    engine: TrapEngine, base: Tensors, spec: LoraSpec
) -> None:
    """Ranks up and down, alpha above, below and equal to the rank, fewer modules: each push
    replaces the one before, for every request from then on, none of which names an adapter.
    """
    start = engine.sample()
    for rank, alpha, modules in (
        (3, 5.0, spec.modules),
        (7, 3.5, spec.modules[::2]),
        (2, 2.0, spec.modules[1:4]),
    ):
        one = replace(spec, rank=rank, alpha=alpha, modules=modules)
        lora = random_lora(base, one, seed=rank)
        engine.call("push", merged(base, lora, one), None)
        assert engine.call("bound") == ()
        whole = engine.sample()
        engine.call("push", base | lora, asdict(one))
        assert engine.call("bound") == with_component(modules)
        assert used(engine) == expected_prints(base, lora, one)
        live, again = engine.sample(), engine.sample()
        assert torch.equal(live["latents"], again["latents"])
        for key, limit in (
            ("latents", 1e-5),
            ("log_probs", 1e-7),
            ("pixels", 1),
        ):  # pixels: 1 of 255 where it rounds
            assert (live[key].double() - whole[key].double()).abs().max() <= limit, key
        assert (live["latents"] - start["latents"]).abs().max() > 0.1
    newer = random_lora(base, one, seed=100)
    engine.call("push", newer, asdict(one))  # the same adapter with other values, without the base
    assert used(engine) == expected_prints(base, newer, one)
    assert not torch.equal(engine.sample()["latents"], live["latents"])
    engine.call("push", base, None)
    assert torch.equal(engine.sample()["latents"], start["latents"])


def test_1_the_callers_tensors_are_his_own(
    engine: TrapEngine, base: Tensors, spec: LoraSpec
) -> None:
    lora = random_lora(base, spec)
    _, kept = engine.call("stock_lora", lora, spec.rank, int(spec.alpha))
    assert not kept  # the trap: the manager's tensors are the caller's, and it scales them in place
    lora = random_lora(base, spec)
    assert engine.call("caller_keeps", lora, asdict(spec))
    assert used(engine) == expected_prints(base, lora, spec)
    pushed = {name: tensor.clone() for name, tensor in (base | lora).items()}
    engine.call("push_and_overwrite", pushed, asdict(spec))
    assert used(engine) == expected_prints(base, lora, spec)


def test_2_a_failed_call_raises(engine: TrapEngine) -> None:
    for method, reason in (("fail", "on purpose"), ("no_such_method", "no_such_method")):
        answer = engine.raw(method)
        assert "'supported': False" in str(answer)  # the trap: no exception
        with pytest.raises(RuntimeError, match=f"worker call {method} failed: .*{reason}"):
            engine.call(method)


def test_3_no_name_is_dropped(engine: TrapEngine, base: Tensors, spec: LoraSpec) -> None:
    lora = random_lora(base, spec)
    bound, _ = engine.call("stock_lora", lora, spec.rank, int(spec.alpha))
    dropped = sorted({f"transformer.{module}" for module in spec.modules} - set(bound))
    assert dropped and all(name.endswith("attn.to_out.0") for name in dropped)  # the trap
    lora = random_lora(base, spec)
    engine.call("push", lora, asdict(spec))
    assert engine.call("bound") == with_component(spec.modules)

    strange = replace(spec, modules=(*spec.modules, "transformer_blocks.9.attn.to_q"))
    with pytest.raises(
        RuntimeError, match="1 LoRA modules are in none of .*: transformer_blocks.9.attn.to_q"
    ):
        engine.call("push", lora, asdict(strange))
    missing = f"transformer.{spec.modules[0]}{LORA_B}"
    with pytest.raises(RuntimeError, match=f"1 missing: {missing}"):
        engine.call(
            "push", {name: tensor for name, tensor in lora.items() if name != missing}, asdict(spec)
        )
    with pytest.raises(RuntimeError, match="1 extra: transformer.proj_out.lora_A.weight"):
        engine.call(
            "push", lora | {"transformer.proj_out.lora_A.weight": torch.zeros(3, 3)}, asdict(spec)
        )
    with pytest.raises(RuntimeError, match=f"{missing} is torch.float32 .* at rank 3"):
        engine.call("push", lora | {missing: torch.zeros(2, 3)}, asdict(spec))
    with pytest.raises(RuntimeError, match="torch.bfloat16"):
        engine.call("push", lora | {missing: lora[missing].bfloat16()}, asdict(spec))
    with pytest.raises(RuntimeError, match="vllm-omni cannot wrap 1 modules .*attn.norm_q"):
        engine.call("push_norm", lora, asdict(spec))
    assert engine.call("bound") == ()  # nothing half bound


def test_4_base_weights_reach_wrapped_layers(
    engine: TrapEngine, base: Tensors, spec: LoraSpec
) -> None:
    changed = {name: 1.1 * tensor for name, tensor in base.items()}
    engine.call("push", changed, None)
    first = engine.sample()
    engine.call("push", base | random_lora(base, spec), asdict(spec))
    name = "transformer.transformer_blocks.0.attn.to_out.0.weight"
    before = used(engine)[name]
    engine.call("stock_load", {name: changed[name]})
    assert used(engine)[name] == before  # the trap: skipped
    engine.call("push", changed, None)
    assert used(engine) == fingerprints(changed)
    assert torch.equal(engine.sample()["latents"], first["latents"])


def test_5_unknown_names_are_refused(engine: TrapEngine, base: Tensors) -> None:
    name = "transformer.transformer_blocks.1.attn.norm_added_q.weight"
    loaded = engine.call(
        "stock_load", {name: base[name], "transformer.unknown.weight": torch.zeros(1)}
    )
    assert loaded == 1  # the trap: no error
    with pytest.raises(
        RuntimeError, match="the replica's model has no tensor transformer.unknown.weight"
    ):
        engine.call("push", base | {"transformer.unknown.weight": torch.zeros(1)}, None)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("flip A", "1 of 123 tensors with other bits .*{module}.lora_A.weight"),
        ("flip B", "1 of 123 tensors with other bits .*{module}.lora_B.weight"),
        ("flip base", "1 of 123 tensors with other bits .*{module}.weight"),
        (
            "unbind",
            (
                "other tensors .* 2 missing: transformer.{module}.lora_A.weight, "
                "transformer.{module}.lora_B.weight"
            ),
        ),
        ("scale", "23 of 123 tensors with other bits .*lora_B.weight"),
        ("stale", "46 of 123 tensors with other bits .*lora_A.weight"),
        (
            "extra",
            (
                "other tensors .* 2 extra: transformer.{module}.lora_A.weight, "
                "transformer.{module}.lora_B.weight"
            ),
        ),
    ],
    ids=lambda value: value if len(value) < 10 else "",
)
def test_what_is_not_used_as_it_was_sent_is_found(
    engine: TrapEngine, base: Tensors, spec: LoraSpec, damage: str, found: str
) -> None:
    lora, module = random_lora(base, spec), "transformer_blocks.0.attn.to_q"
    held = replace(spec, alpha=6.0) if damage == "scale" else spec
    engine.call(
        "push",
        base | (random_lora(base, spec, seed=1) if damage == "stale" else lora),
        asdict(held),
    )
    if damage == "extra":
        spec = replace(spec, modules=tuple(name for name in spec.modules if name != module))
        lora = {name: tensor for name, tensor in lora.items() if f".{module}." not in f".{name}"}
    elif damage not in ("scale", "stale"):
        engine.call("damage", damage, module)
    sent = SentFingerprints({"one": [{}]}, lora=spec)
    sent.add(list((base | lora).items()))
    with pytest.raises(SyncError, match="one at version 1 holds " + found.format(module=module)):
        sent.check("one", 1, engine.call("fingerprints")["workers"])


def test_the_highest_rank_is_vllms() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert max(get_args(MaxLoRARanks)) == MAX_LORA_RANK
