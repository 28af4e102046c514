"""How one model is sharded, as data. A model's plan is in models/<model>/plan.py; engines and the planner read it.

Names are diffusers names. Patterns are shell-style (`*` also matches dots) and are matched against module names:
`Rule("transformer_blocks.*.attn.to_q", "column")` is about the weight and the bias of each block's to_q, and about the
low-rank pair (lora_A.weight, lora_B.weight) that LoRA puts beside them. A rule may also name a parameter itself, as a table
that belongs to a block and to no layer in it needs: `Rule("*scale_shift_table", "replicated")`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"  # [rank, in], [out, rank] of a linear module

# kind → a parameter's name in its module → the dimension that tensor parallelism splits; not listed: whole on every rank
SHARDED_DIM: dict[str, dict[str, int]] = {
    "column": {"weight": 0, "bias": 0, LORA_B: 0},  # linear: this rank's output features
    "row": {
        "weight": 1,
        LORA_A: 1,
    },  # linear: this rank's input features; the bias is added after the sum over ranks
    "modulation": {
        "weight": 0,
        "bias": 0,
    },  # linear on the time embedding: column, with the output gathered
    "head_norm": {},  # weights shared by all heads, of which a rank sees its own only
    "across_heads_norm": {
        "weight": 0
    },  # RMS norm over all heads at once: this rank's heads, the mean square of all
    "replicated": {},
}
LINEAR_KINDS = ("column", "row")  # of what LoRA can wrap and FP8 can multiply


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a rank's piece lies in the full tensor. kind: a key of SHARDED_DIM. sharded_dim: None where it is whole.

    sum_over_tp: whether a rank's gradient is only its tokens' or heads' part, so that the engine must sum it over tp.
    """

    kind: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    sharded_dim: int | None
    sum_over_tp: bool


@dataclass(frozen=True)
class Rule:
    """Modules, or parameters, whose name matches the pattern are sharded as the kind says. kind: a key of SHARDED_DIM."""

    pattern: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """rules: every parameter is matched by exactly one, and every rule matches something.

    blocks: the repeated blocks, units of recompute and of FSDP. attention: the modules whose processor gathers tokens
    itself, splits heads and runs Ulysses; column layers inside them do no collective. token_inputs: arguments of forward
    [B, tokens, …], split over tokens; one that is [B], the same for all tokens, stays whole. stream_entry, stream_exit: the
    module whose first argument, and the one whose output, is the token stream [B, tokens, C], for a forward that makes
    tokens itself (of a video, say): it is split on entering the one and whole again after the other. Without them the
    stream is among token_inputs and forward's output is gathered. unused: modules whose output nobody reads, `{last}`
    being the last block's index; their weights get no gradient. lora_targets: modules that LoRA wraps (lora_modules).
    """

    rules: tuple[Rule, ...]
    blocks: str = "transformer_blocks.*"
    attention: str = "transformer_blocks.*.attn"
    token_inputs: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    stream_entry: str = ""
    stream_exit: str = ""
    unused: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted({rule.kind for rule in self.rules} - SHARDED_DIM.keys())
        if unknown:
            raise ValueError(
                f"rules of unknown kind {', '.join(unknown)}; the kinds are {', '.join(SHARDED_DIM)}"
            )

    @property
    def text_is_stream(self) -> bool:
        """Whether text passes through the blocks as the image does; else cross attention reads it."""
        return "encoder_hidden_states" in self.token_inputs

    def kinds(self, names: Iterable[str]) -> dict[str, str]:
        """Parameter name → kind. Raises ValueError naming the parameter that no rule or several match, or an idle rule."""
        kinds: dict[str, str] = {}
        idle = set(self.rules)
        for name in names:
            found = [
                rule
                for rule in self.rules
                if any(fnmatchcase(x, rule.pattern) for x in (module_of(name), name))
            ]
            if len(found) != 1:
                rules = " and ".join(repr(rule.pattern) for rule in found) or "no rule"
                raise ValueError(
                    f"{name} is matched by {rules}; correct the plan so that exactly one rule matches it"
                )
            kinds[name] = found[0].kind
            idle -= set(found)
        if idle:
            patterns = ", ".join(repr(rule.pattern) for rule in self.rules if rule in idle)
            raise ValueError(
                f"no parameter is matched by {patterns}; correct the plan or remove the rule"
            )
        return kinds

    def placements(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        tp: int,
        tp_rank: int,
        sequence_parallel: bool,
    ) -> dict[str, Placement]:
        """Parameter name → this rank's piece. shapes: of all the full parameters. Raises ValueError as kinds() does and
        for a size that tp does not divide."""
        placements = {}
        for name, kind in self.kinds(shapes).items():
            offsets, local_shape = shard_box(kind, name, shapes[name], tp=tp, tp_rank=tp_rank)
            placements[name] = Placement(
                kind=kind,
                shape=tuple(shapes[name]),
                offsets=offsets,
                local_shape=local_shape,
                sharded_dim=sharded_dim(kind, name),
                sum_over_tp=sums_over_tp(kind, name, tp=tp, sequence_parallel=sequence_parallel),
            )
        return placements

    def block_of(self, name: str) -> int | None:
        """Index of the block that a module or parameter is in; None outside the blocks."""
        prefix = self.blocks.removesuffix("*")
        index = name.removeprefix(prefix).partition(".")[0]
        return int(index) if name.startswith(prefix) and index.isdecimal() else None

    def unused_names(self, names: Iterable[str]) -> set[str]:
        """Those of the parameters that never get a gradient."""
        names = list(names)
        last = max((block for block in map(self.block_of, names) if block is not None), default=0)
        patterns = [pattern.replace("{last}", str(last)) for pattern in self.unused]
        return {
            name
            for name in names
            if any(fnmatchcase(module_of(name), pattern) for pattern in patterns)
        }

    def lora_modules(self, names: Iterable[str]) -> tuple[str, ...]:
        """The modules that LoRA wraps, sorted: those of lora_targets but for the unused ones. names: of all parameters.

        Raises ValueError for a target that matches no module, or one that is neither a column nor a row linear.
        """
        kinds = self.kinds(name for name in names if not is_lora(name))
        unused, found = self.unused_names(kinds), set()
        for pattern in self.lora_targets:
            matched = {name for name in kinds if fnmatchcase(module_of(name), pattern)}
            if not matched:
                raise ValueError(
                    f"no module is matched by the LoRA target {pattern!r}; correct the plan or remove it"
                )
            wrong = sorted(name for name in matched if kinds[name] not in LINEAR_KINDS)
            if wrong:
                raise ValueError(
                    f"the LoRA target {pattern!r} matches {module_of(wrong[0])}, which is {kinds[wrong[0]]}; LoRA wraps "
                    f"{' and '.join(LINEAR_KINDS)} linears only, correct the plan"
                )
            found |= {module_of(name) for name in matched - unused}
        return tuple(sorted(found))

    def is_block(self, name: str) -> bool:
        """Whether a module is one of the blocks."""
        return self.block_of(name) is not None and name.count(".") == self.blocks.count(".")

    def is_attention(self, name: str) -> bool:
        """Whether a module is an attention site."""
        return fnmatchcase(name, self.attention) and name.count(".") == self.attention.count(".")

    def in_attention(self, name: str) -> bool:
        """Whether a module is inside an attention site."""
        return fnmatchcase(name, f"{self.attention}.*")


def is_lora(parameter: str) -> bool:
    """Whether a parameter is one of a low-rank pair."""
    return parameter.endswith((f".{LORA_A}", f".{LORA_B}"))


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to; of a low-rank pair, the module that it is put beside."""
    return parameter.rsplit(".", 2 if is_lora(parameter) else 1)[0] if "." in parameter else ""


def sharded_dim(kind: str, name: str) -> int | None:
    """The dimension along which tensor parallelism splits a parameter; None when every rank holds it whole."""
    return SHARDED_DIM[kind].get(name.removeprefix(f"{module_of(name)}."))


def sums_over_tp(kind: str, name: str, *, tp: int, sequence_parallel: bool) -> bool:
    """Whether the ranks' gradients of a parameter are parts that must be summed over tp.

    Sharded parameters have their whole gradient. Of the others, with split tokens each rank has its tokens' part;
    without, only those that act on single heads differ, and the whole one of a low-rank pair: a column's A sees the
    gradient of this rank's output features alone, a row's B the products of its input features.
    """
    if tp == 1 or sharded_dim(kind, name) is not None:
        return False
    return sequence_parallel or kind == "head_norm" or is_lora(name)


def shard_box(
    kind: str, name: str, shape: tuple[int, ...], *, tp: int, tp_rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, local_shape) of a rank's piece of the full tensor `shape`. Raises ValueError when tp does not divide it."""
    offsets, local_shape = [0] * len(shape), list(shape)
    dim = sharded_dim(kind, name)
    if dim is not None:
        if shape[dim] % tp:
            raise ValueError(
                f"parallel.tp={tp} does not divide dimension {dim} of {name}, which has {shape[dim]} elements; "
                f"set parallel.tp to a divisor of {shape[dim]}"
            )
        local_shape[dim] = shape[dim] // tp
        offsets[dim] = tp_rank * local_shape[dim]
    return tuple(offsets), tuple(local_shape)
