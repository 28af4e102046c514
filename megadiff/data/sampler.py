"""Choose the prompts (or images, pairs) of a step and of a rank, in an order that resumes."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megadiff.data.prompts import digest_of
from megadiff.types import Prompt, PromptBatch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EpochOrder:
    """List indices without end: range(num_items) permuted for epoch 0, then for epoch 1, …

    Without shuffle they are not permuted. source: names the items in messages. digest: a hash of
    the items in their order. It holds a position, equal on every rank, and saves and restores it.
    """

    num_items: int
    seed: int
    shuffle: bool
    source: str = ""
    digest: str = ""
    _position: int = field(default=0, init=False)  # entries taken so far, over all ranks
    _permutations: dict[int, np.ndarray] = field(default_factory=dict, init=False)

    def take(self, start: int, count: int) -> np.ndarray:
        """Return entries start … start + count − 1 of the list, int64."""
        epochs, indices = np.divmod(np.arange(start, start + count), self.num_items)
        if not self.shuffle:
            return indices
        taken = np.empty(count, np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            taken[in_epoch] = self._permutation(epoch)[indices[in_epoch]]
        return taken

    def state(self) -> dict[str, int | str]:
        """Return what a checkpoint keeps, equal on every rank."""
        return {
            "position": self._position,
            "num_prompts": self.num_items,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "digest": self.digest,
            "source": self.source,
        }

    def load_state(self, state: Mapping[str, int | str], *, accept_changes: bool = False) -> None:
        """Continue from state(), under any dp and number of entries a step.

        An empty one, which converted weights have, is the start. Raises ValueError when it is of
        another list, unless changes are accepted: then the run goes on at that position of its own.
        """
        position = int(state["position"]) if state else 0
        expected = self.state()
        # the position is what this sets, and a file may move
        del expected["position"], expected["source"]
        differing = [key for key, value in expected.items() if state.get(key) != value]
        if not state or not differing:
            self._position = position
            return

        saved_text = ", ".join(f"{key}={state.get(key)}" for key in differing)
        expected_text = ", ".join(f"{key}={expected[key]}" for key in differing)
        problem = (
            f"the saved data position has {saved_text}, from {state.get('source')}; this run has "
            f"{expected_text}, from {self.source} (digest: a hash of all rows in order, without "
            "the columns that rewards read)"
        )

        if not accept_changes:
            raise ValueError(
                f"{problem}. They must be equal for the order to continue: restore data.prompts, "
                "data.images or data.pairs, seed and data.shuffle, start a new run, or if you mean "
                "it set checkpoint.accept_changes=true"
            )
        logger.warning("%s; checkpoint.accept_changes: it goes on at %d", problem, position)
        self._position = position

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # Keep the newest two: a step usually spans at most two epochs, but it may span many.
            self._permutations = dict(list(self._permutations.items())[-1:])
            permutation = epoch_permutation(self.num_items, seed=self.seed, epoch=epoch)
            self._permutations[epoch] = permutation
        return self._permutations[epoch]


class PromptSampler(EpochOrder, Iterator[PromptBatch]):
    """Iterate endlessly over PromptBatch.

    The global order is the endless list of EpochOrder. A step takes its next `prompts_per_step`
    entries, and each data-parallel rank a contiguous slice of them. So the union over ranks does
    not depend on dp. A step may have a prompt more than once, as it spans several epochs or two
    rows are equal: `repeats` tells its groups apart.

    shuffle: False keeps the file's order in every epoch. source: names the prompts in messages.
    Raises ValueError for prompts_per_step that dp does not divide.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        prompts_per_step: int,
        dp: int,
        dp_rank: int,
        seed: int,
        shuffle: bool,
        source: str = "data.prompts",
    ) -> None:
        if prompts_per_step < 1 or prompts_per_step % dp:
            fix = max(dp, round(prompts_per_step / dp) * dp)
            raise ValueError(
                f"train.prompts_per_step={prompts_per_step} must be a positive multiple of dp={dp}"
                ", as every data-parallel rank takes whole groups; set "
                f"train.prompts_per_step={fix}"
            )

        assert 0 <= dp_rank < dp, f"dp_rank={dp_rank} is not in 0..{dp - 1}"
        self._prompts = tuple(prompts)
        self._prompts_per_step = prompts_per_step
        self._dp = dp
        self._dp_rank = dp_rank

        digest = digest_of("\n".join(prompt.id for prompt in prompts), size=8)
        super().__init__(len(prompts), seed=seed, shuffle=shuffle, source=source, digest=digest)

    def __next__(self) -> PromptBatch:
        batch = self.peek()
        self._position += self._prompts_per_step
        return batch

    def peek(self) -> PromptBatch:
        """Return the batch of next(), without moving on."""
        num_local = self._prompts_per_step // self._dp
        local = slice(self._dp_rank * num_local, (self._dp_rank + 1) * num_local)
        # Of the whole step: repeats are counted over all ranks.
        indices = self.take(self._position, self._prompts_per_step).tolist()

        seen = Counter[str]()
        repeats = []
        for index in indices:
            # Noise follows from the id, which equal rows share: counted by row, they would draw
            # the same samples.
            prompt_id = self._prompts[index].id
            repeats.append(seen[prompt_id])
            seen[prompt_id] += 1

        return PromptBatch(
            prompts=tuple(self._prompts[index] for index in indices[local]),
            repeats=tuple(repeats[local]),
        )


def epoch_permutation(num_prompts: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(num_prompts), int64, drawn from (seed, epoch) alone."""
    digest = hashlib.blake2b(f"prompts/{seed}/{epoch}".encode(), digest_size=32).digest()
    # Not Generator: of RandomState alone numpy promises never to change its stream (NEP 19), so a
    # run that resumes under another numpy keeps its order.
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(num_prompts)
