"""Describe as data how one model is sharded.

A model's plan is in models/<model>/plan.py; engines and the planner read it. Names are diffusers
names. Patterns are shell-style (`*` also matches dots) and are matched against module names:
`"transformer_blocks.*.attn.to_q": "column"` is about the weight and the bias of each block's to_q.
It is also about the low-rank pair (lora_A.weight, lora_B.weight) that LoRA puts beside them. A rule
may name a parameter itself, as a table of a block needs that belongs to no layer in it:
`"*scale_shift_table": "replicated"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megadiff.types import Shape, Shapes

LORA_A = "lora_A.weight"  # [rank, in], beside a linear module
LORA_B = "lora_B.weight"  # [out, rank]

# kind → a parameter's name in its module → the dimension that tensor parallelism splits;
# a parameter that is not listed is whole on every rank
SHARDED_DIM: dict[str, dict[str, int]] = {
    # linear: this rank's output features
    "column": {"weight": 0, "bias": 0, LORA_B: 0},
    # linear: this rank's input features; the bias is added after the sum over ranks
    "row": {"weight": 1, LORA_A: 1},
    # linear on the time embedding: column, with the output gathered
    "modulation": {"weight": 0, "bias": 0},
    # weights shared by all heads, of which a rank sees its own only
    "head_norm": {},
    # RMS norm over all heads at once: this rank's heads, the mean square of all
    "across_heads_norm": {"weight": 0},
    "replicated": {},
}
LINEAR_KINDS = ("column", "row")  # that LoRA can wrap and FP8 can multiply
FP8_MULTIPLE = 16  # FP8 matrix products take sizes that are multiples of it
FP8_CAPABILITY = (8, 9)  # of the first GPUs that multiply in FP8 (Ada)
# end of a component's name in front of its frozen weights when they are sent: a group of their own
FROZEN = "~frozen"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Locate a rank's shard in the full tensor.

    kind: a key of SHARDED_DIM. sharded_dim: None where the rank has the whole tensor.
    sum_over_tp: whether a rank's gradient is only its tokens' or heads' part, so that the engine
    must sum it over tp.
    """

    kind: str
    shape: Shape
    offsets: tuple[int, ...]
    local_shape: Shape
    sharded_dim: int | None
    sum_over_tp: bool


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Describe a transformer's sharding.

    rules: pattern → kind, a key of SHARDED_DIM. Exactly one matches each parameter, and each
    matches something, but for those of `optional`, which some models of the family have no use for.
    blocks: the repeated blocks, units of recompute and of FSDP; several patterns for several lists.
    attention: the modules whose processor gathers tokens itself, splits heads and runs Ulysses.
    Column layers inside them do no collective.
    token_inputs: arguments of forward [B, tokens, …], split over tokens. An argument that is [B],
    the same for all tokens, stays whole.
    block_tokens: arguments of blocks [B or 1, tokens] that forward makes of all tokens, or None.
    Each is split as the token inputs are.
    stream_entry, stream_exit: for a forward that makes tokens itself (of a video, say). The first
    argument of one module, or its hidden_states by keyword, and the output of the other are the
    token stream [B, tokens, C]. It is split on entry and whole again after the exit. Without them
    the stream is among token_inputs and forward's output is gathered.
    joint_stream: whether that stream is image and text together.
    features: arguments of forward that are cast to the model's dtype, tensors or lists of them.
    unused: modules whose output nobody reads, `{last}` being the index of its list's last block.
    Their weights get no gradient.
    frozen: modules that forward uses and nothing trains. Their weights are in engine.dtype, without
    master, optimizer state or LoRA. They are sent once, and read from the model folder ever after,
    so that no checkpoint holds them.
    constants: buffers that checkpoints hold. Both sides read them from the model folder. They are
    never trained or sent, and in no manifest.
    lora_targets: modules that LoRA wraps (lora_modules).
    """

    rules: Mapping[str, str]
    blocks: str | tuple[str, ...] = "transformer_blocks.*"
    attention: str = "transformer_blocks.*.attn"
    token_inputs: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    block_tokens: tuple[str, ...] = ()
    stream_entry: str = ""
    stream_exit: str = ""
    joint_stream: bool = False
    features: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rules.values()) - SHARDED_DIM.keys())
        if unknown:
            raise ValueError(
                f"rules of unknown kind {', '.join(unknown)}; "
                f"the kinds are {', '.join(SHARDED_DIM)}"
            )

    @property
    def text_is_stream(self) -> bool:
        """Tell whether text passes through the blocks, and not only cross attention reads it."""
        return self.joint_stream or self.num_streams > 1

    @property
    def num_streams(self) -> int:
        """Return how many streams of tokens pass through the blocks: 2 where text has its own."""
        return 2 if "encoder_hidden_states" in self.token_inputs else 1

    def kinds(self, names: Iterable[str]) -> dict[str, str]:
        """Return parameter name → kind.

        Raises ValueError that names a parameter matched by no rule or several, or an idle rule.
        """
        kinds: dict[str, str] = {}
        idle = set(self.rules) - set(self.optional)

        for name in names:
            module = module_of(name)
            matching = [
                pattern
                for pattern in self.rules
                if fnmatchcase(module, pattern) or fnmatchcase(name, pattern)
            ]
            if len(matching) != 1:
                rules = " and ".join(map(repr, matching)) or "no rule"
                raise ValueError(
                    f"{name} is matched by {rules}; "
                    "correct the plan so that exactly one rule matches it"
                )
            kinds[name] = self.rules[matching[0]]
            idle.discard(matching[0])

        if idle:
            patterns = ", ".join(repr(pattern) for pattern in self.rules if pattern in idle)
            raise ValueError(
                f"no parameter is matched by {patterns}; correct the plan or remove the rule"
            )
        return kinds

    def placements(
        self,
        shapes: Shapes,
        *,
        tp: int,
        tp_rank: int,
        sequence_parallel: bool,
    ) -> dict[str, Placement]:
        """Return parameter name → this rank's shard.

        shapes: of all the full parameters. Raises ValueError as kinds() does, and for a size that
        tp does not divide.
        """
        placements = {}
        for name, kind in self.kinds(shapes).items():
            offsets, local_shape = shard_box(kind, name, shapes[name], tp=tp, tp_rank=tp_rank)
            dim = sharded_dim(kind, name)

            # A shard has its whole gradient. With split tokens each rank has its tokens' part of
            # the others'. Without, it has a part of what acts on single heads, and of the whole
            # half of a low-rank pair: a column's A sees the gradient of this rank's output features
            # alone, a row's B the products of its input features.
            is_part = sequence_parallel or kind == "head_norm" or is_lora(name)
            placements[name] = Placement(
                kind=kind,
                shape=tuple(shapes[name]),
                offsets=offsets,
                local_shape=local_shape,
                sharded_dim=dim,
                sum_over_tp=tp > 1 and dim is None and is_part,
            )
        return placements

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Return the names of the modules that hold the blocks."""
        patterns = (self.blocks,) if isinstance(self.blocks, str) else self.blocks
        return tuple(pattern.removesuffix(".*") for pattern in patterns)

    def block_of(self, name: str) -> str | None:
        """Return the name of a module's or parameter's block, None outside the blocks."""
        for blocks in self.block_lists:
            index = name.removeprefix(f"{blocks}.").partition(".")[0]
            if name.startswith(f"{blocks}.") and index.isdecimal():
                return f"{blocks}.{index}"
        return None

    def unused_names(self, names: Iterable[str]) -> set[str]:
        """Return the parameters that never get a gradient."""
        names = list(names)
        last: dict[str, int] = {}
        for block in filter(None, map(self.block_of, names)):
            blocks, _, index = block.rpartition(".")
            last[blocks] = max(last.get(blocks, 0), int(index))

        patterns = []
        for pattern in self.unused:
            blocks = pattern.partition(".{last}")[0]
            patterns.append(pattern.replace("{last}", str(last.get(blocks, 0))))
        return _matched(names, patterns)

    def frozen_names(self, names: Iterable[str]) -> set[str]:
        """Return the parameters that are never trained, low-rank pairs left out."""
        return _matched([name for name in names if not is_lora(name)], self.frozen)

    def trainable(self, shapes: Shapes) -> dict[str, Shape]:
        """Return the shapes without those of parameters that are never trained."""
        frozen = self.frozen_names(shapes)
        return {name: shape for name, shape in shapes.items() if name not in frozen}

    def fp8_weights(self, names: Iterable[str]) -> list[str]:
        """Return the weights that FP8 multiplies: of the blocks' attention and MLPs.

        These see every token. names: of one component's parameters.
        """
        kinds = self.kinds(name for name in names if not is_lora(name))
        return [
            name
            for name, kind in kinds.items()
            if kind in LINEAR_KINDS and name.endswith(".weight") and self.block_of(name) is not None
        ]

    def sent_names(self, component: str, names: Iterable[str]) -> dict[str, str]:
        """Return parameter → its name on the way to replicas, with the component in front."""
        names = list(names)
        frozen = self.frozen_names(names)
        return {name: f"{component}{FROZEN if name in frozen else ''}.{name}" for name in names}

    def lora_modules(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the modules that LoRA wraps, sorted: lora_targets without unused and frozen ones.

        names: of all parameters. Raises ValueError for a target that matches no module, or one
        that is neither a column nor a row linear.
        """
        kinds = self.kinds(name for name in names if not is_lora(name))
        # a LoRA beside a frozen weight would train it
        left_out = self.unused_names(kinds) | self.frozen_names(kinds)

        modules: set[str] = set()
        for pattern in self.lora_targets:
            matched = {name for name in kinds if fnmatchcase(module_of(name), pattern)}
            if not matched:
                raise ValueError(
                    f"no module is matched by the LoRA target {pattern!r}; "
                    "correct the plan or remove it"
                )
            wrong = sorted(name for name in matched if kinds[name] not in LINEAR_KINDS)
            if wrong:
                raise ValueError(
                    f"the LoRA target {pattern!r} matches {module_of(wrong[0])}, which is "
                    f"{kinds[wrong[0]]}; LoRA wraps {' and '.join(LINEAR_KINDS)} linears only, "
                    "correct the plan"
                )
            modules |= {module_of(name) for name in matched - left_out}
        return tuple(sorted(modules))

    def is_block(self, name: str) -> bool:
        """Tell whether a module is a block."""
        return self.block_of(name) == name

    def is_attention(self, name: str) -> bool:
        """Tell whether a module is an attention site."""
        return fnmatchcase(name, self.attention) and name.count(".") == self.attention.count(".")

    def in_attention(self, name: str) -> bool:
        """Tell whether a module is inside an attention site."""
        return fnmatchcase(name, f"{self.attention}.*")


def _matched(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the parameters whose module matches a pattern."""
    names = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        matched |= {name for name in names if fnmatchcase(module_of(name), pattern)}
    return matched


def is_lora(parameter: str) -> bool:
    """Tell whether a parameter is of a low-rank pair."""
    return parameter.endswith((f".{LORA_A}", f".{LORA_B}"))


def module_of(parameter: str) -> str:
    """Return a parameter's module; for a low-rank pair the module that it is put beside."""
    return parameter.rsplit(".", 2 if is_lora(parameter) else 1)[0] if "." in parameter else ""


def sharded_dim(kind: str, name: str) -> int | None:
    """Return the dimension that tensor parallelism splits, None for a whole parameter."""
    return SHARDED_DIM[kind].get(name.removeprefix(f"{module_of(name)}."))


def shard_box(kind: str, name: str, shape: Shape, *, tp: int, tp_rank: int) -> tuple[Shape, Shape]:
    """Return (offsets, local_shape) of a rank's shard of the full tensor `shape`.

    Raises ValueError when tp does not divide it.
    """
    offsets = [0] * len(shape)
    local_shape = list(shape)
    dim = sharded_dim(kind, name)

    if dim is not None:
        if shape[dim] % tp:
            raise ValueError(
                f"parallel.tp={tp} does not divide dimension {dim} of {name}, which has "
                f"{shape[dim]} elements; set parallel.tp to a divisor of {shape[dim]}"
            )
        local_shape[dim] = shape[dim] // tp
        offsets[dim] = tp_rank * local_shape[dim]
    return tuple(offsets), tuple(local_shape)
