"""The replicas of a run as one: route calls, make failed ones again elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

from megadiff.config.rollout import HEARTBEAT_S
from megadiff.rollout.client.call_queue import CallQueue, ReplicaCall, calls
from megadiff.rollout.client.client import Drawn, ReplicaClient, ReplicaError
from megadiff.rollout.client.processes import ReplicaDied, log_tail
from megadiff.rollout.client.pulse import Pulse
from megadiff.rollout.client.report import DIED, HUNG, Loss, Report, no_report
from megadiff.rollout.client.weight_target import WeightTarget
from megadiff.rollout.limits import LOCKED, Limits
from megadiff.types import RolloutGroup, RolloutRequest, Sampling

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.2
LIMITS = Limits()
MAX_THREADS = 2048  # they are started as calls need them
HEALTH_TRIALS = 3
LEAST_CALL_S = 1e-3  # the wait is measured from outside, and may take in some of the drawing
NOT_CURRENT = 409  # the status of a replica that holds other weights
# The caller's mistakes, which every replica would answer alike. So may whatever has its address.
REFUSALS = (400, 401, 404, 413)


class CallFailed(RuntimeError):
    """A call has failed wherever it was made; the text names its prompts."""


@dataclass(eq=False)
class Fleet(AbstractContextManager["Fleet"]):
    """All replicas of the run seen from one trainer rank; a context manager.

    batch_size: samples of one call to a replica. logs: name → log file. rank, num_ranks: of the
    Fleets that share the replicas. num_replicas: for which a step is cut into calls, whatever
    number there is at the moment; 0 takes that of the beginning. heartbeat_s: a replica that hangs
    in a call for so long is lost; None where a supervisor asks those in `called` for their health.
    report: told of calls that are made again.
    lost: addresses of replicas found to be of no use since the last set_replicas() → the reason.
    """

    replicas: Sequence[ReplicaClient]
    _: KW_ONLY
    batch_size: int
    logs: Mapping[str, Path] = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1
    num_replicas: int = 0
    heartbeat_s: float | None = HEARTBEAT_S
    report: Report = no_report

    def __post_init__(self) -> None:
        self.lost: dict[str, Loss] = {}
        self.holders: set[ReplicaClient] = set()  # of weights: they have taken a whole push
        # As many as this rank would have for itself.
        self._num_replicas = max(1, (self.num_replicas or len(self.replicas)) // self.num_ranks)
        self._rates: dict[str, float] = {}  # replica → seconds a sample
        self._pool = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="fleet")
        self._num_calling: Counter[ReplicaClient] = Counter()
        self._ending: set[ReplicaClient] = set()  # lost in a call that is not over yet
        self._calling_lock = threading.Lock()
        self._closed = threading.Event()
        self._watch_thread = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        if self.heartbeat_s is not None:
            self._watch_thread.start()

    def __exit__(self, *_: object) -> None:
        """Drop what is still in flight; the processes are stopped by who started them."""
        self._closed.set()
        if self._watch_thread.is_alive():
            self._watch_thread.join(5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self.replicas:
            client.close()

    def set_replicas(self, clients: Sequence[ReplicaClient]) -> None:
        """Work with these from now on; connections to others are closed."""
        for client in self.replicas:
            if client not in clients:
                client.close()
                self._rates.pop(client.name, None)
        self.replicas = clients
        self.lost = {}
        self.holders &= set(clients)

    def plan(self, requests: Sequence[RolloutRequest]) -> list[ReplicaCall]:
        """Cut requests into calls, which generate() makes.

        A batch is as wide as its longest prompt: those of similar length go into one call.
        """
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt.text))
        calls = []
        for batch in self._batches(requests, order):
            num_samples = sum(len(requests[index].sample_indices) for index in batch)
            calls.append(ReplicaCall(batch, num_samples))
        return calls

    def generate(
        self, requests: Sequence[RolloutRequest], calls: Sequence[ReplicaCall] | None = None
    ) -> Iterator[tuple[int, RolloutGroup]]:
        """Yield (index of the request, group) as groups arrive.

        calls: of plan(); those that are done are left out. A call that fails is made again on
        another replica. Ends early, with calls that are not done, when no replica is left.
        Raises CallFailed for a call that fails everywhere, and ReplicaError for a mistake of ours.
        """
        queue = CallQueue(self.plan(requests) if calls is None else calls, *self._known())
        futures: dict[Future[Drawn], tuple[ReplicaCall, ReplicaClient]] = {}

        try:
            while not queue.is_over and not queue.is_stuck:
                self._drop_lost(queue, requests)
                self._give_out(queue, requests, futures)
                done, _ = wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED)

                # Answers first: a failure gives the replica up, with all that it had.
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    call, client = futures.pop(future)
                    if client.url in self.lost:
                        continue  # _drop_lost() gives its calls to others
                    error = future.exception()
                    if isinstance(error, ReplicaError):
                        self._take_back(queue, requests, call, client, error)
                        continue
                    drawn = future.result()
                    _note_answer(queue, call, client.name, drawn)
                    yield from zip(call.indices, drawn.groups, strict=True)
        finally:
            for future, (_, client) in futures.items():
                # Interrupted: the replica would draw on for nobody, the next call behind that.
                if not future.cancel() and future.running():
                    client.close()

    def _known(self) -> tuple[list[str], dict[str, float]]:
        """Return the names of replicas that are of use, and their rates.

        Where replicas are equally fast, ranks begin with different ones.
        """
        first = self.rank * self._num_replicas % max(1, len(self.replicas))
        order = [*self.replicas[first:], *self.replicas[:first]]
        return [client.name for client in order if client.url not in self.lost], self._rates

    def _give_out(
        self,
        queue: CallQueue,
        requests: Sequence[RolloutRequest],
        futures: dict[Future[Drawn], tuple[ReplicaCall, ReplicaClient]],
    ) -> None:
        clients = {client.name: client for client in self.replicas}
        while taken := queue.take(time.monotonic()):
            call, name = taken
            asked = [requests[index] for index in call.indices]
            future = self._pool.submit(self._watched, clients[name], methodcaller("draw", asked))
            futures[future] = (call, clients[name])

    def _take_back(
        self,
        queue: CallQueue,
        requests: Sequence[RolloutRequest],
        call: ReplicaCall,
        client: ReplicaClient,
        error: ReplicaError,
    ) -> None:
        """Give a failed call back, and the replica up where it is dead, busy or not current."""
        is_alive = error.status not in (NOT_CURRENT, LOCKED) and self.is_alive(client, error)
        if not is_alive:
            self.lose(client, _loss(error))
            return
        if error.status in REFUSALS:
            raise error
        is_answer = error.status is not None
        given_s = queue.given_s(call, client.name)
        is_useless = queue.fail(
            call, client.name, str(error), is_answer=is_answer, now_s=time.monotonic()
        )
        self._check_poisoned(call, requests, error)
        if is_useless:
            self.lose(client, Loss(f"it fails its calls: {error}"))
            return
        self._report_retry(client, given_s, str(error))
        logger.warning("a call is made again: %s", error)

    def _report_retry(self, client: ReplicaClient, given_s: float, text: str) -> None:
        lost_s = time.monotonic() - given_s
        self.report("call_retried", replica=client.name, lost_s=lost_s, text=text)

    def is_alive(self, client: ReplicaClient, error: ReplicaError) -> bool:
        """Tell whether the replica still answers: a connection may break and the process live."""
        if error.is_timeout:
            return False  # busy for longer than a call may take
        for _ in range(HEALTH_TRIALS):
            time.sleep(POLL_S)  # a dying process needs a moment to be seen dead
            with suppress(ReplicaError):
                return client.health().get("name") == client.name
        return False

    def _drop_lost(self, queue: CallQueue, requests: Sequence[RolloutRequest]) -> None:
        """Give the calls of lost replicas to others."""
        for client in self.replicas:
            loss = self.lost.get(client.url)
            if loss is None:
                continue
            for call, given_s in queue.lose(client.name).items():
                self._check_poisoned(call, requests, loss.reason)
                self._report_retry(client, given_s, loss.reason)

    def lose(self, client: ReplicaClient, loss: Loss) -> None:
        """Work without a replica until set_replicas(); what waits for its answers fails at once."""
        if client.url in self.lost:
            return
        logger.warning("%s at %s is lost: %s", client.name, client.url, loss.reason)
        self.lost[client.url] = loss
        with self._calling_lock:
            if client in self._num_calling:
                self._ending.add(client)
        client.close()

    def _watch(self) -> None:
        """Lose replicas that hang in a call, until the end."""
        assert self.heartbeat_s is not None
        pulse = Pulse(self.heartbeat_s)
        while not self._closed.wait(POLL_S):
            self.lose_hung(pulse.hung(self.called))
        pulse.close()

    def lose_hung(self, hung: Mapping[str, Loss]) -> None:
        """Lose those of the called ones that hang: address → the reason."""
        for client in self._calling:
            if client.url in hung:
                self.lose(client, hung[client.url])

        for client in self._ending.copy():
            # Again: a call may have opened a connection after the others were closed.
            client.close()

    @property
    def called(self) -> list[ReplicaClient]:
        """Return the replicas that are in a call, whether they draw or take weights."""
        return [client for client in self._calling if client.url not in self.lost]

    @property
    def _calling(self) -> list[ReplicaClient]:
        """Return the replicas that are in a call, lost ones as well."""
        with self._calling_lock:
            return list(self._num_calling)

    def _watched(self, client: ReplicaClient, call: Callable[[ReplicaClient], T]) -> T:
        """Return call(client), and have the replica watched meanwhile."""
        with self._calling_lock:
            self._num_calling[client] += 1
        try:
            return call(client)
        finally:
            with self._calling_lock:
                self._num_calling[client] -= 1
                if not self._num_calling[client]:
                    del self._num_calling[client]
                    self._ending.discard(client)

    def _check_poisoned(
        self, call: ReplicaCall, requests: Sequence[RolloutRequest], error: object
    ) -> None:
        """Raise CallFailed where another replica would not help; the fleet is spared."""
        if not call.is_poisoned:
            return
        prompts = [requests[index].prompt for index in call.indices]
        named = ", ".join(f"{prompt.id} ({prompt.text[:60]!r})" for prompt in prompts)
        said = "; ".join(call.errors.values()) or error
        raise CallFailed(
            f"the call with prompts {named} failed {call.num_errors} times on living replicas and "
            f"{call.num_losses} times with their connections: {said}. Take these prompts out, or "
            "look at the replicas' logs"
        )

    def generate_on(self, replica: int, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """Return the groups of a given replica, in order, from one call for each sampling."""
        groups: dict[int, RolloutGroup] = {}
        client = self.replicas[replica]
        for batch in self._batches(requests, range(len(requests)), whole=True):
            called = [requests[index] for index in batch]
            drawn = self.call(client, methodcaller("draw", called))
            groups |= zip(batch, drawn.groups, strict=True)
        return [groups[index] for index in range(len(requests))]

    def _batches(
        self, requests: Sequence[RolloutRequest], order: Iterable[int], *, whole: bool = False
    ) -> list[list[int]]:
        """Cut requests into calls, each of equal sampling; return their indices.

        whole: a call holds all of a sampling that its body takes, however many replicas there are.
        """
        by_sampling: dict[Sampling, list[int]] = {}
        for index in order:
            by_sampling.setdefault(requests[index].sampling, []).append(index)

        batches = []
        for sampling, indices in by_sampling.items():
            sizes = [len(requests[index].sample_indices) for index in indices]
            cuts = calls(
                sizes,
                batch_size=len(sizes) * max(sizes) if whole else self.batch_size,
                num_replicas=1 if whole else self._num_replicas,
                most_groups=LIMITS.num_requests(sampling.images),
            )
            batches += [indices[cut.start : cut.stop] for cut in cuts]

        return batches

    def weight_targets(self) -> list[WeightTarget]:
        """Return the replicas as the weight sync sees them."""
        return [WeightTarget(client, self) for client in self.replicas]

    def sleep(self) -> None:
        """Let every replica free its weights, until a push brings all of the policy's."""
        self._for_all(ReplicaClient.sleep)

    def trim(self) -> None:
        """Let every replica give back memory that it does not need at the moment."""
        self._for_all(ReplicaClient.trim)

    def _for_all(self, call: Callable[[ReplicaClient], object]) -> None:
        """Call every replica; one that does not answer is lost, and freed its memory that way."""
        of_use = [client for client in self.replicas if client.url not in self.lost]
        for future in [self._pool.submit(self.call, client, call) for client in of_use]:
            with suppress(ReplicaDied):  # self.lost has it
                future.result()

    def call(self, client: ReplicaClient, call: Callable[[ReplicaClient], T]) -> T:
        """Return call(client).

        Raises ReplicaDied, with its log's end, and loses the replica where no answer comes in time.
        """
        try:
            return self._watched(client, call)
        except ReplicaError as error:
            if error.status is not None and not error.is_timeout:
                raise
            raise self.death(client, error, "does not answer") from error

    def death(self, client: ReplicaClient, error: ReplicaError, what: str) -> ReplicaDied:
        self.lose(client, _loss(error))
        tail = log_tail(self.logs[client.name]) if client.name in self.logs else ""
        return ReplicaDied(f"{client.name} at {client.url} {what}: {error}\n{tail}")


def _note_answer(queue: CallQueue, call: ReplicaCall, replica: str, drawn: Drawn) -> None:
    call.replica = replica
    call.engine_s = drawn.engine_s
    call.queue_s = drawn.queue_s
    queue.succeed(
        call,
        replica,
        # without its wait behind others, or the replica that answers last would look slowest
        seconds=max(drawn.engine_s - drawn.queue_s, LEAST_CALL_S),
        outstanding=drawn.outstanding,
        now_s=time.monotonic(),
    )


def _loss(error: ReplicaError) -> Loss:
    return Loss(str(error), HUNG if error.is_timeout else DIED)
