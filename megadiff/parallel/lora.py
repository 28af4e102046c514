"""Put LoRA beside a frozen transformer's linear layers: y = W x + scale · B (A x).

scale = alpha / rank. The plan says which layers have one. A layer keeps its parameters and their
names. It gains two child modules, lora_A (weight [rank, in]) and lora_B (weight [out, rank]), as in
peft. B A is never added to W: bfloat16 would round it away, and the replicas compute it apart too.
One switch turns all of them off. Then the transformer is the policy that training began with,
without a copy of anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.config.schema import LoraConfig
from megadiff.diffusion.noise import uniform
from megadiff.parallel.plan import LORA_A, LORA_B, ParallelPlan
from megadiff.types import LoraSpec, Shapes


class Adapters:
    """Switch one transformer's LoRA on or off.

    is_on is read in every forward, recomputed ones included.
    """

    def __init__(self, spec: LoraSpec) -> None:
        self.spec = spec
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Make the transformer its frozen base within the context.

        Not around a forward whose backward comes later: recompute would see LoRA on again.
        """
        was_on = self.is_on
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = was_on


def lora_spec(lora: LoraConfig, plan: ParallelPlan, names: Iterable[str]) -> LoraSpec | None:
    """Return the LoRA that the config asks for, None for lora.rank=0.

    names: of all the base's parameters. Raises ValueError for targets that do not fit the model.
    """
    if not lora.rank:
        return None
    modules = _chosen(lora, plan.lora_modules(names))
    return LoraSpec(rank=lora.rank, alpha=float(lora.alpha or lora.rank), modules=modules)


def _chosen(lora: LoraConfig, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the modules that lora.targets name, all without any, but lora.exclude's.

    A pattern is shell-style and for the end of a name, from a dot on; peft's suffixes are such.
    Raises ValueError for a pattern that matches none, and where none is left.
    """
    matched: dict[str, set[str]] = {}
    for key, patterns in (("targets", lora.targets), ("exclude", lora.exclude)):
        matched[key] = set()
        for pattern in patterns:
            names = {name for name in modules if fnmatchcase(f".{name}", f"*.{pattern}")}
            if not names:
                # within a block, each once
                endings = sorted({name.split(".", 2)[-1] for name in modules})
                raise ValueError(
                    f"lora.{key}: {pattern!r} is the end of none of the {len(modules)} modules "
                    f"that can have LoRA: {', '.join(endings)}; correct or remove it"
                )
            matched[key] |= names

    chosen = (matched["targets"] or set(modules)) - matched["exclude"]
    if not chosen:
        raise ValueError(
            f"lora.exclude={lora.exclude} leaves none of the {len(matched['targets'] or modules)} "
            "modules of lora.targets; remove some of it"
        )
    return tuple(sorted(chosen))


def lora_shapes(spec: LoraSpec | None, shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Return name → shape of every low-rank tensor, in the order of the base's parameters.

    shapes: of the base's parameters.
    """
    pairs: dict[str, tuple[int, int]] = {}
    if spec is None:
        return pairs

    wrapped = set(spec.modules)
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if module in wrapped and leaf == "weight":
            pairs[f"{module}.{LORA_A}"] = (spec.rank, shape[1])
            pairs[f"{module}.{LORA_B}"] = (shape[0], spec.rank)
    return pairs


def start_values(name: str, shape: tuple[int, int], *, seed: int) -> Tensor:
    """Return the full tensor that training begins with, float32 on CPU, equal in every layout.

    A is uniform within 1/√in of 0, as peft's kaiming_uniform with a = √5.
    """
    if name.endswith(LORA_B):
        return torch.zeros(shape)  # so that LoRA changes nothing yet
    return uniform(shape, key=f"{seed}/lora/{name}") / math.sqrt(shape[1])


def adapt(
    layer: nn.Module,
    adapters: Adapters,
    *,
    in_features: int,
    out_features: int,
    enter: Callable[[Tensor], Tensor] | None = None,
    leave: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Put LoRA, weights on meta, beside a layer.

    Its forward is then leave(layer(enter(x)) + scale · B (A enter(x))).
    in_features, out_features: of this rank.
    enter, leave: for split layers, the collectives of both products.
    """
    rank = adapters.spec.rank
    layer.lora_A = nn.Linear(in_features, rank, bias=False, device="meta")
    layer.lora_B = nn.Linear(rank, out_features, bias=False, device="meta")
    # plain attributes, no parameters, buffers or modules
    vars(layer).update(adapters=adapters, enter=enter or _same, leave=leave or _same)
    # another class and no wrapper around it: the parameters keep their names
    layer.__class__ = _adapted(type(layer))  # type: ignore[arg-type]  # mypy: unhashable class


def adapt_linears(module: nn.Module, adapters: Adapters) -> None:
    """Put LoRA beside whole nn.Linear layers and freeze all else. Weights are still on meta."""
    module.requires_grad_(False)
    for name in adapters.spec.modules:
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear), name  # lora_modules() chose linears only
        adapt(linear, adapters, in_features=linear.in_features, out_features=linear.out_features)


@cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the layer's class with LoRA in its forward."""
    # cached, one class for all of a kind: torch.compile would make code for every single layer

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = kind.forward(self, x)
        if self.adapters.is_on:
            y = y + functional.linear(
                self.lora_A(x), scaled(self.lora_B.weight, self.adapters.spec)
            )
        return self.leave(y)

    return type(f"Adapted{kind.__name__}", (kind,), {"forward": forward})


def scaled(weight_B: Tensor, spec: LoraSpec) -> Tensor:
    """Return scale · B, rounded once to B's dtype, as replicas do: both sides round alike."""
    return weight_B if spec.scale == 1 else (weight_B.float() * spec.scale).to(weight_B.dtype)


def _same(x: Tensor) -> Tensor:
    return x
