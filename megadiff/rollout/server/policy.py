"""Decide which weights a replica holds, and when it may generate.

Pure state, the rules of a weight push: no tensors, no I/O.
"""

from __future__ import annotations

from megadiff.tensors.lora_names import lora_manifest
from megadiff.tensors.manifest import Manifest, TensorRow, name_difference
from megadiff.tensors.weight_groups import WeightGroup, names_by_weight_group
from megadiff.types import LoraSpec

UNPUSHED = -1  # the version of the weights on disk, before any push


class Refused(Exception):
    """Refuse a request, with an HTTP status and a text that says why and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PolicyState:
    """Keep the state of a replica's weights; it generates only when ready.

    ready → (begin) → updating → (commit) → ready, and ready → asleep → (begin) → updating.
    A push brings whole groups: a component's base weights, or its LoRA tensors. What it leaves out
    must have been committed before, and stays in use: LoRA tensors only under an equal spec.
    A push that fails on the way leaves the state at updating, because the weights are then a
    mixture. The next one brings all of them; so does the push that wakes a sleeping replica.
    expected: every base tensor of the pipeline.
    """

    def __init__(self, expected: Manifest, *, has_weights: bool = True) -> None:
        """Begin with the weights on disk, or asleep where none were loaded."""
        self.expected = expected
        self.version = UNPUSHED
        self.state = "ready" if has_weights else "asleep"
        self._has_weights = has_weights
        self.pending_version = UNPUSHED  # means something while updating only
        self.num_pushes = 0  # that have begun: a bucket belongs to one of them
        self.lora: LoraSpec | None = None  # of the policy, or of the push that is open
        # Every base weight was pushed and kept, and no push or sleep has touched them since.
        self._holds_base = False
        self._pending: Manifest = {}
        self._received: set[str] = set()

    def require_ready(self, asked_version: int | None = None) -> None:
        """Raise Refused(409) unless it is ready and holds the asked version (None: any)."""
        if self.state == "updating":
            raise Refused(
                409,
                f"version {self.pending_version} is being pushed over version {self.version} and "
                "is not committed; finish the push, or begin it again",
            )
        if self.state == "asleep":
            raise Refused(409, "the replica is asleep and holds no weights; push all of them")
        if asked_version not in (None, self.version):
            raise Refused(
                409,
                f"policy_version {asked_version} was asked for, this replica holds {self.version}",
            )

    def begin(self, version: int, manifest: Manifest, lora: LoraSpec | None = None) -> None:
        """Enter updating.

        Raises Refused when a group is left out that the replica does not hold (409), and for
        tensors that this pipeline does not take (400).
        """
        if version < 0:
            raise Refused(400, f"version={version} must be at least 0")

        left_out = self._checked_groups(manifest, lora) - names_by_weight_group(manifest).keys()
        # A LoRA of another spec is another LoRA.
        holds_lora = self._holds_base and lora == self.lora
        lacking = [
            str(group)
            for group in sorted(left_out)
            if not (holds_lora if group.is_lora else self._holds_base)
        ]
        if lacking:
            raise Refused(
                409,
                f"the push leaves out {' and '.join(lacking)}, which this replica does not hold "
                "from pushes before it; push everything",
            )

        self._holds_base = False
        self._has_weights = True
        self.num_pushes += 1
        self.state = "updating"
        self.pending_version = version
        self.lora = lora
        self._pending = manifest
        self._received = set()

    def check_bucket(self, bucket: Manifest) -> None:
        """Raise Refused when no push is open (409), or for an unknown or unlike tensor (400)."""
        self._require_updating()
        unknown = sorted(bucket.keys() - self._pending.keys())
        if unknown:
            raise Refused(400, f"tensors that the manifest does not hold: {', '.join(unknown[:5])}")
        for name, row in bucket.items():
            _check_same(name, row, self._pending[name])

    def check_push(self, number: int) -> None:
        """Raise Refused(409) when the push that a request was sent for is not open any more."""
        if number != self.num_pushes:
            raise Refused(
                409, "another push began while this request waited; it changed nothing, push again"
            )

    def loaded(self, bucket: Manifest) -> None:
        """Note that the bucket's tensors are in the pipeline."""
        self._received |= bucket.keys()

    def check_commit(self, version: int) -> None:
        """Raise Refused unless the push of this version is open (409) and complete (400)."""
        self._require_updating()
        if version != self.pending_version:
            raise Refused(
                409,
                f"commit of version {version}, but the push that is open is {self.pending_version}",
            )
        difference = name_difference(set(self._pending), self._received)
        if difference:
            raise Refused(
                400, f"commit of version {version} before all tensors came: {difference}; send them"
            )

    def commit(self, *, keeps_base: bool = True) -> None:
        """Make the pending version the policy.

        keeps_base: whether the base weights stay as they came, so that a later push may omit them.
        """
        self.state = "ready"
        self.version = self.pending_version
        self._holds_base = keeps_base

    def lose_received(self) -> None:
        """Forget the tensors that came, as they are not whole any more; only a new push helps."""
        self._received = set()

    def fall_asleep(self, *, keeps_base: bool = False) -> None:
        """Enter asleep. Raises Refused(409) when not ready.

        keeps_base: whether the push that wakes it may leave out what it holds.
        """
        if not self._has_weights:
            return  # it has been asleep from the start
        self.require_ready()
        self.state = "asleep"
        self._holds_base = self._holds_base and keeps_base

    def _checked_groups(self, manifest: Manifest, lora: LoraSpec | None) -> set[WeightGroup]:
        """Return all groups that the replica uses after the push.

        Raises Refused(400) unless the manifest consists of whole groups.
        """
        try:
            rows = self.expected | (lora_manifest(lora, self.expected) if lora else {})
        except ValueError as error:
            raise Refused(400, str(error)) from None

        groups = names_by_weight_group(rows)
        for group, names in names_by_weight_group(manifest).items():
            expected = groups.get(group, set())
            difference = name_difference(expected, names)
            if difference:
                raise Refused(
                    400,
                    f"the manifest differs from the {len(expected)} tensors of {group}: "
                    f"{difference}",
                )

        for name, row in manifest.items():
            _check_same(name, row, rows[name])
        return set(groups)

    def _require_updating(self) -> None:
        if self.state != "updating":
            raise Refused(
                409,
                f"no weight push is open, the replica is {self.state}; POST /rl/weights/begin "
                "first",
            )


def _check_same(name: str, row: TensorRow, expected: TensorRow) -> None:
    # JSON's 128.0 and true equal integers, but are no sizes further on.
    if row != expected or any(type(size) is not int for size in row["shape"]):
        raise Refused(
            400,
            f"{name} comes as {row}, the pipeline holds {expected}; send that dtype and shape, or "
            "start the replica with the --dtype of the run's model.dtype",
        )
