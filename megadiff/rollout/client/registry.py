"""The registry: a folder in which replicas announce themselves.

What lies there is a claim. A replica counts when the process at the announced address answers by
the announced name and proves that it knows the run's token. Whatever else is found is left out
with a warning, and the wait goes on.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megadiff.process.words import counted
from megadiff.rollout.client.client import (
    HEALTH_TIMEOUT_S,
    UNUSABLE,
    NotProven,
    ReplicaClient,
    ReplicaError,
)
from megadiff.rollout.client.processes import ReplicaDied, ReplicaProcess, log_tail
from megadiff.rollout.proof import NAME_RULE, is_name, is_url
from megadiff.types import JsonObject

logger = logging.getLogger(__name__)
POLL_S = 0.2
PROGRESS_S = 5.0
FIRST_ANSWER_S = 1.0  # so that the first by name are taken, and not the first to answer
MAX_VISITS = 32  # addresses that are asked at the same time
# far more than name, url and pid need
ANNOUNCEMENT_BYTES = 2**16
SHOWN = 8  # claims that an error names
UNREAD = "cannot be read"  # of reasons that may pass


class Address(NamedTuple):
    name: str
    url: str

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An announcement in its file. entry: all that it says, name and url among it."""

    path: Path
    entry: Mapping[str, Any]

    @property
    def address(self) -> Address:
        return Address(self.entry["name"], self.entry["url"])


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The outcome of asking an address. health: None where it does not count, for this reason.

    is_odd: a running replica of this run would not answer so.
    """

    health: JsonObject | None = None
    reason: str = "no answer yet"
    is_odd: bool = False

    @property
    def works_for_another(self) -> bool:
        """Tell whether another run is at work with it, and cannot lose it."""
        return self.health is not None and bool(self.health.get("is_taken"))


def wait_until_announced(
    registry: Path,
    *,
    count: int,
    timeout_s: float,
    processes: Sequence[ReplicaProcess] = (),
    token: str | None = None,
    run: str = "",
) -> list[JsonObject]:
    """Wait for count healthy replicas and return their announcements by file name.

    "health" is what /health says. Logs a progress line every few seconds. Raises ReplicaDied when
    one of the processes ends, or after timeout_s.
    """
    start_s = time.monotonic()
    last_line_s = start_s

    with closing(RegistryWatch(registry, token=token, run=run)) as waiting:
        while True:
            healthy = waiting.look()
            for process in processes:
                if death := process.death():
                    raise ReplicaDied(death)

            elapsed = time.monotonic() - start_s
            if len(healthy) >= count and waiting.has_asked_all():
                logger.info("%s healthy after %.1f s", counted(count, "replica"), elapsed)
                if len(healthy) > count:
                    text = (
                        "%d replicas are healthy in %s; those beyond rollout.num_replicas=%d join"
                    )
                    logger.info(text, len(healthy), registry, count)
                return healthy[:count]

            progress = (
                f"{len(healthy)} of rollout.num_replicas={count} replicas healthy in {registry} "
                f"after {elapsed:.0f} s, rollout.start_timeout_s={timeout_s:.0f}"
            )
            if elapsed > timeout_s:
                tails = "\n".join(log_tail(process.log) for process in processes)
                raise ReplicaDied(
                    f"{progress}; raise it, or start more with `megadiff serve CONFIG.yaml … "
                    "key=value`, the run's own (on other nodes with --host ADDRESS)"
                    f"{waiting.left_out_text()}\n"
                    f"{tails}"
                )

            if time.monotonic() - last_line_s > PROGRESS_S:
                last_line_s = time.monotonic()
                logger.info("waiting for replicas: %s%s", progress, waiting.left_out_text())

            time.sleep(POLL_S)


def read_claims(registry: Path) -> tuple[list[Claim], dict[Path, str]]:
    """Read the announcements, by file name, and tell why other files with their ending are none."""
    claims = []
    reasons = {}

    try:
        names = sorted(name for name in os.listdir(registry) if name.endswith(".json"))
    except FileNotFoundError:
        names = []  # the first replica makes the folder
    except OSError as error:
        return [], {registry: f"the folder {UNREAD}: {error.strerror}"}

    for name in names:
        path = registry / name
        try:
            claims.append(Claim(path=path, entry=_read_entry(path)))
        except FileNotFoundError:
            if path.is_symlink():
                reasons[path] = "a link to nothing"
            # else its replica has just ended
        except OSError as error:
            reasons[path] = f"{UNREAD}: {error.strerror}"
        except ValueError as error:
            reasons[path] = str(error)

    return claims, reasons


def _read_entry(path: Path) -> JsonObject:
    """Return what an announcement says. Raises ValueError that says why it is none, and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer

    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        # one byte more than is allowed shows a file that is too large
        body = os.read(descriptor, ANNOUNCEMENT_BYTES + 1)
    finally:
        os.close(descriptor)

    if len(body) > ANNOUNCEMENT_BYTES:
        raise ValueError(f"larger than {ANNOUNCEMENT_BYTES} bytes")

    try:
        entry = json.loads(body.decode())
    # JSON that is nested too deeply ends in a RecursionError
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error!s:.100}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"a {type(entry).__name__} and not a JSON object")

    name = entry.get("name")
    if not is_name(name):
        raise ValueError(f"its name is {name!r:.80}, not {NAME_RULE}")
    url = entry.get("url")
    if not is_url(url):
        raise ValueError(f"its url is {url!r:.80}, not http[s]://HOST:PORT")

    return entry


class RegistryWatch:
    """Ask all announced addresses, again and again, in threads: a slow one delays no other.

    Used by one thread at a time.
    """

    def __init__(self, registry: Path, *, token: str | None, run: str) -> None:
        self.registry = registry
        self._token = token
        self._run = run
        self._pool = ThreadPoolExecutor(MAX_VISITS, thread_name_prefix="registry")
        self._running: dict[Address, Future[Visit]] = {}
        self._visits: dict[Address, Visit] = {}  # the last one of each
        self._first_seen_s: dict[Address, float] = {}
        self.claims: list[Claim] = []  # of the last look
        self._settled: Collection[tuple[str, str]] = ()
        self._left_out: dict[Path, str] = {}
        self._warned: set[Path] = set()

    def close(self) -> None:
        """Wait for nothing: what is still asked ends by its own deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self, *, settled: Collection[tuple[str, str]] = ()) -> list[JsonObject]:
        """Return the announcements that count by now, by file name; takes at most POLL_S.

        settled: names and addresses that are not asked, and not returned. Once they are settled no
        longer, what they answered before does not count.
        """
        self._settled = settled
        self._warn_of_writers()
        self.claims, self._left_out = self._read()
        # A service that starts its replicas again on other ports has any number of addresses.
        claimed = {claim.address for claim in self.claims}
        for address in self._first_seen_s.keys() - claimed:
            del self._first_seen_s[address]
        for address in self._visits.keys() - (claimed - set(settled)):
            del self._visits[address]

        for claim in self.claims:
            address = claim.address
            self._first_seen_s.setdefault(address, time.monotonic())
            if address not in self._running and address not in settled:
                future = self._pool.submit(_visit, address, token=self._token, run=self._run)
                self._running[address] = future

        wait(self._running.values(), timeout=POLL_S)
        for address, future in list(self._running.items()):
            if future.done():
                self._visits[address] = future.result()
                del self._running[address]

        healthy = self._healthy()
        for path, reason in self._left_out.items():
            self._warn(path, reason)
        return healthy

    def names(self) -> set[str]:
        """Return the names that the last look found announced."""
        return {claim.address.name for claim in self.claims}

    def is_announced(self, name: str) -> bool:
        """Look for a name's announcement now: where it was last, and in the file of that name.

        Not through the whole folder: a node that dies may take dozens of hundreds of replicas, and
        is asked for each of them. One that has just moved to a third file joins at the next look.
        """
        last_paths = {claim.path for claim in self.claims if claim.address.name == name}
        for path in last_paths | {self.registry / f"{name}.json"}:
            try:
                entry = _read_entry(path)
            except (FileNotFoundError, ValueError):
                continue
            except OSError:
                if path in last_paths:  # as in _read(): it is not gone
                    return True
                continue
            if entry["name"] == name:
                return True
        return False

    def has_asked_all(self) -> bool:
        """Tell whether every announced address has answered, or had its time to."""
        since_s = time.monotonic() - FIRST_ANSWER_S
        addresses = {claim.address for claim in self.claims} - self._visits.keys()
        return all(self._first_seen_s[address] <= since_s for address in addresses)

    def left_out_text(self) -> str:
        """Name what is in the registry and does not count, with the reasons."""
        texts = [f"{path.name} ({reason})" for path, reason in self._left_out.items()]
        for claim in self.claims:
            visit = self._visits.get(claim.address, Visit())
            is_open = claim.address not in self._settled and claim.path not in self._left_out
            if is_open and (visit.health is None or visit.works_for_another):
                texts.append(f"{claim.address} ({visit.reason})")
        return f"; left out: {', '.join(texts[:SHOWN])}" if texts else ""

    def _read(self) -> tuple[list[Claim], dict[Path, str]]:
        """Return read_claims(), with the earlier claims in place of what cannot be read now.

        It is not gone: over NFS a read may fail once.
        """
        claims, reasons = read_claims(self.registry)
        unread = {path for path, text in reasons.items() if UNREAD in text}
        if self.registry in unread:
            return self.claims, reasons
        return claims + [claim for claim in self.claims if claim.path in unread], reasons

    def _healthy(self) -> list[JsonObject]:
        """Return the proven announcements of replicas that are free, each name and address once."""
        # Only a proven one takes its name: else a claim could keep the real replica out.
        taken: dict[str, Path] = {}
        healthy = []

        for claim in self.claims:
            if claim.address in self._settled:
                taken |= dict.fromkeys(claim.address, claim.path)

        for claim in self.claims:
            address = claim.address
            visit = self._visits.get(address, Visit())
            if address in self._settled:
                continue
            first = taken.get(address.name) or taken.get(address.url)
            if visit.is_odd:
                self._left_out[claim.path] = f"{address}: {visit.reason}"
            elif visit.health is not None and first is not None:
                self._left_out[claim.path] = f"{address} is announced in {first.name} already"
            elif visit.health is not None:
                taken |= dict.fromkeys(address, claim.path)
                if not visit.works_for_another:
                    healthy.append({**claim.entry, "health": visit.health})
        return healthy

    def _warn_of_writers(self) -> None:
        try:
            mode = self.registry.stat().st_mode
        except OSError:
            return  # not there yet
        if mode & stat.S_IWOTH:
            self._warn(self.registry, "every user of this machine can write here; chmod o-w it")

    def _warn(self, path: Path, reason: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            logger.warning("registry: %s: %s", path, reason)


def _visit(address: Address, *, token: str | None, run: str) -> Visit:
    """Ask one address for its health and its proof, within twice HEALTH_TIMEOUT_S."""
    with closing(ReplicaClient(address.url, address.name, token=token, run=run)) as client:
        try:
            health = client.health()
            if health.get("name") != address.name:  # another process has its port by now
                return Visit(reason=f"no answer by that name, but by {health.get('name')!r:.80}")
            client.prove(timeout_s=HEALTH_TIMEOUT_S)
        except NotProven as error:
            return Visit(reason=error.message, is_odd=True)
        except ReplicaError as error:
            if error.status is None:
                return Visit(reason="no answer from here")
            return Visit(reason=error.message[:300], is_odd=error.status == UNUSABLE)

    # told where it works for another run
    reason = (
        f"it works for the run {health.get('run')!r:.80}; give each run a registry of its own "
        "(rollout.registry)"
    )
    return Visit(health=health, reason=reason)
