"""The arguments that benchmarks share."""

from __future__ import annotations

from bench_machine import with_default


def test_overrides_alone_are_of_the_default_config() -> None:
    default = ["recipe.yaml", "engine.compile=false"]
    assert with_default([], default) == default
    assert with_default(["optim.lr=1"], default) == [*default, "optim.lr=1"]
    assert with_default(["a.yaml", "optim.lr=1"], default) == ["a.yaml", "optim.lr=1"]
