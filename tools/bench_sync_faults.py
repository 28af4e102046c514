#!/usr/bin/env python3
"""Spoil pushes to real replicas, one fault each, and count those that nobody noticed.

    python tools/bench_sync_faults.py --count 1000 --seed 0
    python tools/bench_sync_faults.py --seed 0 --only 417       # one trial again, with its message

Two replicas of one worker and one of two get the tiny model's weights, whole or as LoRA, over the
transports http, shm, disk and nccl (by gloo on a CPU). Trials take transports and kinds in turn.
Each draws a form of its kind (tools/sync_faults.py), a replica, a bucket and a bit, and demands:

1. The push raises an error that names the replica, and the replica refuses to generate, or
   samples the new version with its very bits.
2. A fault that raises nothing has left all bits right: this is proven by fingerprints in the push,
   and here by a sample of each replica. It counts as harmless.
3. The next push without a fault makes all replicas sample the bits that they sampled before.

Prints a line for each trial that fails, and a table. Exit code 1 when one fails.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bench_machine import tool_parser
from sync_faults import ALL, KINDS, draw
from sync_injector import Fault, FaultyClient, Injector, spoiled_messages
from tiny_replicas import IMPORTS, PAIR, make_model, start_replicas
from torch import Tensor
from two_policies import POLICIES, TwoPolicies, sync_without_engine

from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from megadiff.rollout.client.client import ReplicaError
from megadiff.rollout.client.fleet import Fleet
from megadiff.sync.sync import WeightSync
from megadiff.sync.transports import group_join
from megadiff.sync.transports.group import GroupTransport
from megadiff.types import Prompt, RolloutRequest, Sampling

BUCKET_BYTES = 2**20  # four or five buckets of the tiny model
MESSAGE_S = 1.0  # of the group's transfers: a message that is lost is waited for so long
JOIN_S = 3.0  # of the group's members
HEARTBEAT_S = 10.0  # far above what a trial takes, so that only a replica that hangs is lost
REQUEST = RolloutRequest(
    prompt=Prompt(text="a red cat", id="ab" * 8),
    sampling=Sampling(
        height=64, width=64, num_inference_steps=2, sde_window_size=1, sde_window_range=(0, 1)
    ),
    sample_indices=(0,),
    seed=3,
    step=0,
)


@dataclass
class Tally:
    """What came of the trials: (kind, transport, outcome) → how many, and what was missed."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    forms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def add(self, number: int, fault: Fault, outcome: str, text: str) -> None:
        self.counts[fault.kind, fault.transport, outcome] += 1
        self.forms[fault.kind, fault.form, outcome] += 1
        if outcome == "missed":
            self.missed.append(f"trial {number}: {text}\n    {fault}")

    def num(self, outcome: str) -> int:
        return sum(count for key, count in self.counts.items() if key[2] == outcome)

    def table(self) -> str:
        """Return a markdown table: found, or found + harmless, of each kind and transport."""
        lines = ["", f"| fault | {' | '.join(ALL)} | missed |", "|---" * (len(ALL) + 2) + "|"]
        for kind in KINDS:
            cells = []
            for transport in ALL:
                found = self.counts[kind, transport, "found"]
                harmless = self.counts[kind, transport, "harmless"]
                cells.append(f"{found} + {harmless}" if harmless else str(found))
            missed = sum(self.counts[kind, transport, "missed"] for transport in ALL)
            lines.append(f"| {kind} | {' | '.join(cells)} | {missed} |")
        return "\n".join(lines) + "\n"


class Trials:
    """Push to a fleet with and without faults, one sync for each transport.

    clients: of the replicas; PAIR has the workers that can be told to mix things up.
    """

    def __init__(
        self,
        clients: Sequence[FaultyClient],
        weights: TwoPolicies,
        injector: Injector,
        mesh: Mesh,
        stack: ExitStack,
    ) -> None:
        self.weights = weights
        self.injector = injector
        self.fleet = Fleet(clients, batch_size=1, heartbeat_s=HEARTBEAT_S)
        stack.enter_context(self.fleet)
        self.clients = clients
        self.version = 1000
        self.tally = Tally()
        self._state: tuple[str, bool] | None = None
        self._num_buckets: dict[tuple[bool, bool], int] = {}
        stack.enter_context(spoiled_messages(injector))
        self.syncs = {name: stack.enter_context(closing(self._sync(name, mesh))) for name in ALL}
        self._samples = {is_lora: self._reference(is_lora) for is_lora in (False, True)}
        for client in clients:
            client.injector = injector

    def _sync(self, transport: str, mesh: Mesh) -> WeightSync:
        sync = sync_without_engine(
            self.weights,
            self.fleet,
            transport,
            manifest=self.weights.manifest,
            mesh=mesh,
            folder=self.injector.folder,
            bucket_bytes=BUCKET_BYTES,
        )
        if isinstance(sync.transport, GroupTransport):
            sync.transport.timeout_s = MESSAGE_S
            self.injector.first_ranks = sync.transport.first_ranks
        return sync

    def _reference(self, is_lora: bool) -> dict[str, dict[str, Tensor]]:
        """Return policy → replica → its sample, from pushes without faults."""
        samples = {}
        for policy in POLICIES:
            self._use("http", is_lora)
            self._push("http", policy)
            samples[policy] = {client.name: self._sample(client) for client in self.clients}
        first, second = (samples[policy] for policy in POLICIES)
        assert not any(torch.equal(first[name], second[name]) for name in first)
        return samples

    def _use(self, transport: str, is_lora: bool, *, is_whole: bool = True) -> None:
        """Turn to a transport and mode. is_whole: the next push brings everything."""
        self.weights.lora = self.weights.spec if is_lora else None
        if is_whole or self._state != (transport, is_lora):
            self.syncs[transport].forget()
        self._state = (transport, is_lora)

    def _push(self, transport: str, policy: str) -> None:
        self.version += 1
        self.weights.policy = policy
        self.syncs[transport].push(self.version)

    def _clean_push(self, transport: str) -> None:
        # a fault may have lost one: as run_replicas.py does before a push
        self.fleet.set_replicas(self.clients)
        self.injector.arm(None)
        self._push(transport, POLICIES[0])
        self.injector.keep()

    def _sample(self, client: FaultyClient) -> Tensor:
        return client.generate(replace(REQUEST, policy_version=self.version)).latents_GSLC

    def _state_of(self, client: FaultyClient, policy: str) -> str:
        """Return "refuses", or "samples" what it should with this policy, or "is wrong"."""
        try:
            sample = self._sample(client)
        except ReplicaError as error:
            return "refuses" if error.status == 409 else f"is wrong: {error}"
        expected = self._samples[self.weights.lora is not None][policy][client.name]
        return "samples" if torch.equal(sample, expected) else "is wrong: it samples other bits"

    def run(self, number: int, seed: str) -> str:
        """Make one trial; return what became of it, for people."""
        # One of each kind in a row, so that LoRA tensors travel alone in most.
        turn, of_kind = divmod(number, len(KINDS))
        is_lora = bool(turn // len(ALL) % 2)
        transport = ALL[turn % len(ALL)]
        random_source = random.Random(f"{seed}/{number}")
        names = [client.name for client in self.clients]
        is_whole = not is_lora or random_source.random() < 0.3

        if self._state != (transport, is_lora):
            self._use(transport, is_lora)
            self._clean_push(transport)
        num_buckets = self._count(transport, is_lora, is_whole)
        while True:
            fault = draw(random_source, transport, KINDS[of_kind], names)
            self._use(transport, is_lora, is_whole=is_whole)
            self.injector.arm(fault, num_buckets=num_buckets)
            try:
                self._push(transport, POLICIES[1])
                error = ""
            except AgreedError as failure:
                error = str(failure)
            if self.injector.was_injected:
                break
            # Such as names of one shape in a bucket that has no two: draw another one.
            assert not error, error
            self._clean_push(transport)

        outcome, text = self._judge(fault, error)
        if outcome == "harmless":
            outcome, text = self._after_harmless(transport, fault, text)
        else:
            self._clean_push(transport)
        wrong = self._wrong(POLICIES[0])
        if wrong:
            outcome = "missed"
            text = f"after a push without a fault {wrong}; before: {text}"
        self.tally.add(number, fault, outcome, text)
        return f"{number} {outcome}: {fault.kind}/{fault.form} by {transport}: {text}"

    def _count(self, transport: str, is_lora: bool, is_whole: bool) -> int:
        """Return how many buckets such a push has."""
        key = (is_lora, is_whole)
        if key not in self._num_buckets:
            self._use(transport, is_lora, is_whole=is_whole)
            self._clean_push(transport)
            self._num_buckets[key] = self.injector.num_buckets
            if not is_whole:
                # What comes late may be of any earlier push.
                self._use(transport, is_lora)
                self._clean_push(transport)
        return self._num_buckets[key]

    def _judge(self, fault: Fault, error: str) -> tuple[str, str]:
        states = {client.name: self._state_of(client, POLICIES[1]) for client in self.clients}
        wrong = [f"{name} {state}" for name, state in states.items() if state.startswith("is")]
        if wrong:
            return "missed", f"{'; '.join(wrong)}; the error was {error!r:.500}"
        if error:
            if fault.target not in error:
                return "missed", f"the error does not name {fault.target}: {error:.500}"
            return "found", error
        refusing = [name for name, state in states.items() if state == "refuses"]
        if refusing:
            return "missed", f"nothing was raised, and {', '.join(refusing)} refuse"
        return "harmless", "all samples have their right bits"

    def _after_harmless(self, transport: str, fault: Fault, text: str) -> tuple[str, str]:
        """Push without a fault: what the faulty push left may show there, and is found then."""
        try:
            self._clean_push(transport)
        except AgreedError as failure:
            outcome, text = self._judge_next(fault, str(failure))
            self._clean_push(transport)
            return outcome, text
        return "harmless", text

    def _judge_next(self, fault: Fault, error: str) -> tuple[str, str]:
        wrong = self._wrong(POLICIES[0], may_refuse=True)
        if wrong or fault.target not in error:
            return "missed", f"{wrong or 'the wrong replica is named'}; in the next push: {error}"
        return "found", f"in the next push: {error}"

    def _wrong(self, policy: str, *, may_refuse: bool = False) -> str:
        right = ("samples", "refuses") if may_refuse else ("samples",)
        states = {client.name: self._state_of(client, policy) for client in self.clients}
        return "; ".join(f"{name} {state}" for name, state in states.items() if state not in right)


def open_trials(
    model: Path, urls: Mapping[str, str], injector: Injector, stack: ExitStack
) -> Trials:
    """Return trials with these replicas, name → address."""
    layout = resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=1)
    mesh = init_mesh(layout, "cpu")
    clients = [FaultyClient(url, name, timeout_s=60) for name, url in urls.items()]
    return Trials(clients, TwoPolicies(model), injector, mesh, stack)


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", type=int, help="the number of one trial, to see it again")
    parser.add_argument("--model", type=Path, help="a folder; by default a tiny one is made")
    parser.add_argument("--verbose", action="store_true", help="a line for each trial")
    options = parser.parse_args(argv)

    group_join.JOIN_S = JOIN_S
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sync_faults_")))
        model = options.model
        for name in IMPORTS:
            importlib.import_module(name)
        if model is None:
            model = folder / "model"
            make_model(model)
        injector = Injector(folder / "weights", folder / "fault")
        urls = start_replicas(model, folder, injector, stack)
        named = dict(zip(("replica_0", "replica_1", PAIR), urls, strict=True))
        trials = open_trials(model, named, injector, stack)

        numbers = range(options.count) if options.only is None else [options.only]
        start_s = time.monotonic()
        for number in numbers:
            line = trials.run(number, options.seed)
            if options.verbose or options.only is not None or " missed: " in line:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        seconds = time.monotonic() - start_s

    tally = trials.tally
    sys.stdout.write(tally.table())
    for (kind, form, outcome), count in sorted(tally.forms.items()):
        sys.stdout.write(f"{kind}/{form}: {count} {outcome}\n")
    outcomes = ", ".join(f"{tally.num(each)} {each}" for each in ("found", "harmless", "missed"))
    sys.stdout.write(
        f"{len(numbers)} trials, seed {options.seed}: {outcomes}, in {seconds:.0f} s\n"
    )
    return int(bool(tally.missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
