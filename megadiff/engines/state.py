"""An engine's state of one component on this rank: masters, moments, reference, average.

All of it can be saved and loaded under another layout. What idles can be moved to the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from megadiff.algorithms import REFERENCE, build_algorithm
from megadiff.config.schema import Config
from megadiff.engines.gate import GateEndedError, StepGate
from megadiff.engines.gathering import local
from megadiff.engines.lora import is_frozen
from megadiff.engines.offload import HostCopies
from megadiff.parallel.mesh import Mesh
from megadiff.tensors.shards import AVERAGED, LAGGING, TRAINED, Shard, ShardFolder
from megadiff.types import Tensors

# torch's names for them in AdamW's state
MOMENTS = ("exp_avg", "exp_avg_sq")


class ComponentState(ABC):
    """Hold float32 master weights and AdamW's moments of this rank's shards of a component."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        component: str,
        optimizer: torch.optim.AdamW,
        optimized: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
    ) -> None:
        """Take over a component's tensors. Names are the component's own (diffusers).

        optimized: name → the tensor that the optimizer holds for the parameter on this rank.
        masters: name → this rank's shard of the float32 weights, also of never trained ones. Of a
        frozen component they are the weights themselves, in engine.dtype, and stand for reference
        and average as well.
        """
        self.config = config
        self.mesh = mesh
        self.component = component
        self.optimizer = optimizer
        self._optimized = dict(optimized)
        self._masters = dict(masters)
        self.num_updates = 0
        self.gate = StepGate(mesh.device)

        self._on_host = HostCopies(mesh.device)  # keys are names in a checkpoint
        self._exchanged: Mapping[str, Tensor] | None = None  # what changed places with the masters

        self.is_frozen = is_frozen(config, component)
        self._reference: Tensors | None = None
        # with LoRA the reference is the frozen weights
        needs_reference = REFERENCE in build_algorithm(config.algorithm).needs
        if needs_reference and not config.lora.rank:
            initial = {} if self.is_frozen else self._masters
            # on the host: only the pass for the reference policy needs it
            self._reference = {name: shard.to("cpu", copy=True) for name, shard in initial.items()}

        self._average: Tensors = {}  # sharded as the masters are
        if config.algorithm.ema_decay:
            self._average = {
                name: shard if self.is_frozen else shard.clone()
                for name, shard in self._masters.items()
            }

        self._lagging: Tensors = {}  # sharded as the masters are
        if config.algorithm.lagging_decay and not self.is_frozen:
            # on the host: only rollouts and a pass before the update need it
            self._lagging = {
                name: shard.to("cpu", copy=True) for name, shard in self._masters.items()
            }

    @abstractmethod
    def _shards(self, name: str, values: Tensor) -> list[Shard]:
        """Place a master's, average's or moment's values in the full tensor, without a copy."""

    @abstractmethod
    def _is_first_holder(self, name: str) -> bool:
        """Tell whether this rank is the first of those that hold the same shard."""

    @abstractmethod
    def _masters_changed(self) -> None:
        """Note that masters were written to. Not collective: an error's way out calls it too."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with self._swapped(self._average):
            yield

    @contextmanager
    def lagging(self) -> Iterator[None]:
        with self._swapped(self._lagging):
            yield

    def follow(self, decay: float) -> None:
        """Move the lagging policy towards the masters: decay · lagging + (1 − decay) · masters."""
        self._await_queued()
        with self.gate.change():  # a rescue may save neither a half nor a later one
            for name, lagging in self._lagging.items():
                lagging.lerp_(self._master(name).to(lagging.device), 1 - decay)

    def shards(self) -> dict[str, list[Shard]]:
        """Return name in a checkpoint → this rank's shards of weights and moments, where they are.

        What several ranks hold is the first one's. Frozen weights are in engine.dtype.
        """
        return {
            key: self._shards(name, self._on_host.current(key, values))
            for key, name, values in self._state()
            if self._is_first_holder(name)
        }

    def load(self, source: ShardFolder) -> None:
        """Read a checkpoint bit by bit, whatever layout, world size and engine wrote it.

        Raises ValueError that names the torn file and tensor. Without collectives: a rank that
        finds a torn file leaves no other waiting.
        """
        algorithm = self.config.algorithm
        for kind, name, key in (
            (AVERAGED, "averaged", "ema_decay"),
            (LAGGING, "lagging", "lagging_decay"),
        ):
            is_there = any(stored.startswith(f"{kind}/") for stored in source.shapes)
            decay = getattr(algorithm, key)
            if is_there != bool(decay):  # it would be lost, or made up
                raise ValueError(
                    f"{source.folder} has {'' if is_there else 'no '}{name} weights, but "
                    f"algorithm.{key}={decay}; set it as it was, or start a new run"
                )

        self._settle()
        self.num_updates = int(source.values["optimizer_steps"].get(self.component, 0))
        self._create_moments(source)

        for key, name, tensor in self._state():
            if key.startswith(f"{AVERAGED}/") and tensor is self._masters[name]:
                continue  # an untrained weight is its own average, whatever the checkpoint's was
            if key.startswith(f"{LAGGING}/") and key not in source.shapes:
                tensor.copy_(self._master(name))  # it was not trained, so it has not lagged
                continue
            values = self._on_host.current(key, tensor)
            # checkpoints are float32; a frozen component's weights are in engine.dtype
            float_values = values.float()
            for shard in self._shards(name, float_values):
                source.read_into(key, shard)
            values.copy_(float_values)  # does nothing where they are one tensor

        self._masters_changed()

    def reserve_host_memory(self) -> None:
        """Take host memory for all that offload() will move, AdamW's moments included."""
        self._on_host.reserve(self._will_offload())

    @property
    def num_offloaded_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._will_offload().values())

    def offload(self, *, waits: bool = True) -> None:
        """Move what only an update needs to the host; does nothing where it is there.

        waits: until the accelerator's memory is free. Else copies are begun, and until a call that
        waits, or the next update, all stays where it is.
        """
        if self._on_host.on_device:
            self._on_host.begin_leaving(self._offloadable())
        if waits:
            self._settle()

    def onload(self, *, waits: bool = True) -> None:
        """Undo offload(). waits: until tensors may be used, else copies are begun."""
        self._on_host.begin_returning()
        if waits and not self._on_host.on_device:
            with self.gate.change(tears=False):
                self._on_host.arrive()

    def _settle(self, *, waits: bool = True) -> None:
        """Leave what is on its way on the host."""
        if self._on_host.moves:
            with self.gate.change(tears=False, waits=waits):
                self._on_host.settle()

    def _will_offload(self) -> Tensors:
        """Return _offloadable() as it will be once AdamW has made its moments."""
        moments = {
            self._moment_key(kind, name): local(tensor.detach())
            for name, tensor in self._optimized.items()
            for kind in MOMENTS
        }
        return moments | self._offloadable()

    def _offloadable(self) -> Tensors:
        """Return name in a checkpoint → tensor with its own storage that only an update needs."""
        # an average is the master itself where nothing trains it, and on the host beside such a one
        averages = {
            f"{AVERAGED}/{self.component}.{name}": average
            for name, average in self._average.items()
            if average is not self._masters[name] and average.device == self.mesh.device
        }
        return {key: moment for key, _, moment in self._moments()} | averages

    def _update_average(self) -> None:
        if self._average:
            # rises to its value as (1 + n) / (10 + n), so that the start is soon forgotten
            decay = min(
                self.config.algorithm.ema_decay, (1 + self.num_updates) / (10 + self.num_updates)
            )
            torch._foreach_lerp_(
                list(self._average.values()), list(self._masters.values()), 1 - decay
            )

    @contextmanager
    def _swapped(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        self._swap(others)
        try:
            yield
        except BaseException:
            # a rescue that has ended the gate puts the policy back itself; to wait here for a
            # gate that opens no more would hold the error until the process is killed
            with suppress(GateEndedError):
                self._swap(others, waits=False)
            raise
        self._swap(others)

    def _swap(self, others: Mapping[str, Tensor], *, waits: bool = True) -> None:
        # what leaves may no longer change; it stays on the host until an update
        self._settle(waits=waits)
        if not waits:
            self.gate.check_open()  # before what may never end
        self._await_queued()
        with self.gate.change(waits=waits):
            self._exchange(others)
            self._exchanged = None if self._exchanged is others else others
        self._masters_changed()

    def _await_queued(self) -> None:
        """Wait for queued collectives outside of the gate, as another rank may never join them."""
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _exchange(self, others: Mapping[str, Tensor]) -> None:
        """Exchange masters and other shards (on any device) in place, one tensor at a time."""
        # one at a time: a second copy of all masters may not fit
        for name, tensor in others.items():
            master = self._master(name)
            other = tensor
            if others is self._average:
                other = self._on_host.current(f"{AVERAGED}/{self.component}.{name}", tensor)
            policy = master.to(other.device, copy=True)
            master.copy_(other)
            other.copy_(policy)

    def _master(self, name: str) -> Tensor:
        """Return where a master's values are now."""
        return self._on_host.current(f"{TRAINED}/{self.component}.{name}", self._masters[name])

    def undo_exchange(self) -> None:
        """Put the policy back into the masters, where reference() or averaged() is on for good."""
        if self._exchanged is not None:
            self._exchange(self._exchanged)
            self._exchanged = None

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield what _state() does of AdamW's moments. An unused branch never gets one."""
        for name, tensor in self._optimized.items():
            if state := self.optimizer.state.get(tensor):
                for kind in MOMENTS:
                    yield self._moment_key(kind, name), name, local(state[kind])

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name in a checkpoint, parameter's name, this rank's values) of all it holds."""
        averages = ((AVERAGED, self._average), (LAGGING, self._lagging))
        for kind, tensors in ((TRAINED, self._masters), *averages):
            for name, values in tensors.items():
                yield f"{kind}/{self.component}.{name}", name, values
        yield from self._moments()

    def _moment_key(self, kind: str, name: str) -> str:
        return f"optim/{kind}/{self.component}.{name}"

    def _create_moments(self, source: ShardFolder) -> None:
        """Create empty moments where the checkpoint has some, on the host if the rest is there."""
        self.optimizer.state.clear()
        is_away = not self._on_host.on_device
        self._on_host.forget("optim/")  # moments that are no more
        if is_away:
            self._on_host.reserve(self._will_offload())
        for name, tensor in self._optimized.items():
            if self._moment_key(MOMENTS[0], name) in source.shapes:
                moments = {kind: torch.zeros_like(tensor.detach()) for kind in MOMENTS}
                # float32 whatever torch's default is: bfloat16 would round it from 256 on
                step = torch.tensor(
                    float(self.num_updates), dtype=torch.float32, device=self.mesh.device
                )
                self.optimizer.state[tensor] = {"step": step, **moments}
                for kind, moment in moments.items() if is_away else ():
                    self._on_host.put_away(self._moment_key(kind, name), local(moment))
