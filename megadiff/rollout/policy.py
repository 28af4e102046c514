"""Which weights a replica holds, and when it may generate. No tensors, no I/O: the rules of a weight push."""

from __future__ import annotations

from megadiff.types import LoraSpec
from megadiff.weights.lora_names import is_lora_name, lora_manifest
from megadiff.weights.manifest import Manifest, name_difference

UNPUSHED = -1  # the version of the weights on disk, before any push


class Refused(Exception):
    """A request that this replica does not serve: an HTTP status and a text that says why and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PolicyState:
    """ready → (begin) → updating → (commit) → ready, and ready ↔ asleep. It generates only when ready.

    expected: every base tensor of the pipeline. A push brings all of them, or them and LoRA tensors, or LoRA tensors alone
    over a base that was pushed whole. A push that fails on the way leaves the state at updating, because the weights are
    then a mixture; a new begin starts over, with the base.
    """

    def __init__(self, expected: Manifest) -> None:
        self.expected = expected
        self.version = UNPUSHED
        self.state = "ready"
        self.pending_version: int | None = None
        self.lora: LoraSpec | None = None  # of the policy, or of the push that is open
        self._holds_base = False  # a base was pushed whole, and nothing was broken off since
        self._pending: Manifest = {}
        self._received: set[str] = set()

    def require_ready(self, asked_version: int | None = None) -> None:
        """Raises Refused(409) unless it is ready and holds the asked version (None: any)."""
        if self.state == "updating":
            raise Refused(
                409,
                f"version {self.pending_version} is being pushed over version {self.version} and is not committed; "
                "finish the push, or begin it again",
            )
        if self.state == "asleep":
            raise Refused(409, "the replica is asleep; POST /rl/wake first")
        if asked_version not in (None, self.version):
            raise Refused(409, f"policy_version {asked_version} was asked for, this replica holds {self.version}")

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None = None) -> None:
        """Enter updating. Raises Refused when asleep (409), or for tensors that this pipeline does not take (400)."""
        if self.state == "asleep":
            raise Refused(409, "the replica is asleep; POST /rl/wake before a push")
        if version < 0:
            raise Refused(400, f"version={version} must be at least 0")
        self._check_manifest(manifest, lora)
        holds_base = self._holds_base and self.state == "ready"
        if not manifest.keys() & self.expected.keys() and not holds_base:
            raise Refused(
                409,
                "LoRA tensors alone, but this replica holds no base weights of a whole push; push the base with them",
            )
        brings_base = bool(manifest.keys() & self.expected.keys())
        self._holds_base = holds_base and not brings_base
        self.state, self.pending_version, self.lora = "updating", version, lora
        self._pending, self._received = manifest, set()

    def check_bucket(self, bucket: Manifest) -> None:
        """Raises Refused when no push is open (409), or for a tensor that is unknown or of another kind (400)."""
        self._require_updating()
        unknown = sorted(bucket.keys() - self._pending.keys())
        if unknown:
            raise Refused(400, f"tensors that the manifest does not hold: {', '.join(unknown[:5])}")
        for name, row in bucket.items():
            _check_same(name, row, self._pending[name])

    def loaded(self, bucket: Manifest) -> None:
        """The bucket's tensors are in the pipeline."""
        self._received |= bucket.keys()

    def check_commit(self, version: int) -> None:
        """Raises Refused when no push is open or another version is (409), or when tensors did not arrive (400)."""
        self._require_updating()
        if version != self.pending_version:
            raise Refused(409, f"commit of version {version}, but the push that is open is {self.pending_version}")
        difference = name_difference(set(self._pending), self._received)
        if difference:
            raise Refused(400, f"commit of version {version} before all tensors came: {difference}; send them")

    def commit(self) -> None:
        """The pending version is the policy."""
        assert self.pending_version is not None
        self.state, self.version, self.pending_version = "ready", self.pending_version, None
        self._holds_base = True

    def fall_asleep(self) -> None:
        self.require_ready()
        self.state = "asleep"

    def wake(self) -> None:
        """Raises Refused(409) when it is not asleep."""
        if self.state != "asleep":
            raise Refused(409, f"the replica is {self.state}, not asleep")
        self.state = "ready"

    def _check_manifest(self, manifest: Manifest, lora: LoraSpec | None) -> None:
        """Raises Refused(400) unless the manifest is the base's tensors, those of the LoRA, or both."""
        try:
            of_lora = lora_manifest(lora, self.expected) if lora else {}
        except ValueError as error:
            raise Refused(400, str(error)) from None
        adapters = {name for name in manifest if is_lora_name(name) and name not in self.expected}
        parts = {"LoRA": (set(of_lora), adapters)}
        if not of_lora or manifest.keys() - adapters:
            parts["pipeline"] = (set(self.expected), manifest.keys() - adapters)
        for kind, (expected, found) in parts.items():
            difference = name_difference(expected, found)
            if difference:
                raise Refused(400, f"the manifest differs from the {kind}'s {len(expected)} tensors: {difference}")
        known = self.expected | of_lora
        for name, row in manifest.items():
            _check_same(name, row, known[name])

    def _require_updating(self) -> None:
        if self.state != "updating":
            raise Refused(409, f"no weight push is open, the replica is {self.state}; POST /rl/weights/begin first")


def _check_same(name: str, row: object, expected: dict[str, object]) -> None:
    if row != expected:
        raise Refused(400, f"{name} comes as {row}, the pipeline holds {expected}; send that dtype and shape")
