"""`megadiff serve` whose workers mix up what is whose, when a file says so.

    python tools/faulty_worker.py FILE MODEL --tp 2 …

The file is empty, or holds a form and the number of a bucket:
parts N: bucket N, and all LoRA tensors, are cut as if worker 0 were worker 1, and the other way
round.
answers N: the workers' fingerprints are answered in each other's place.
idle N: the last worker leaves bucket N out.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm.distributed import get_tp_group

from megadiff.rollout.worker.extension import RolloutWorkerExtension
from megadiff.types import JsonObject

VARIABLE = "MEGADIFF_SYNC_FAULT_FILE"


def fault() -> tuple[str, int]:
    """Return the form and the bucket's number, "" where nothing is to go wrong."""
    words = Path(os.environ[VARIABLE]).read_text().split()
    return (words[0], int(words[1])) if words else ("", 0)


class FaultyExtension(RolloutWorkerExtension):
    """Load and answer as the file says."""

    _bucket = 0

    def begin_push(self, transport: JsonObject) -> None:
        self._bucket = 0
        super().begin_push(transport)

    def load_bucket(self, source: JsonObject) -> None:
        form, number = fault()
        is_due = number == self._bucket
        self._bucket += 1
        group = get_tp_group()
        # all replicas of the tool run this code, and those of one worker are to be right
        is_last = 0 < group.rank_in_group == group.world_size - 1
        if form == "idle" and is_due and is_last:
            with self._receiver.tensors(source):
                return
        if form == "parts" and is_due:
            with self._as_the_other():
                super().load_bucket(source)
        else:
            super().load_bucket(source)

    def bind_lora(self, spec: JsonObject | None) -> None:
        if fault()[0] == "parts":
            with self._as_the_other():
                super().bind_lora(spec)
        else:
            super().bind_lora(spec)

    def fingerprints(self) -> JsonObject:
        answer = super().fingerprints()
        if fault()[0] == "answers":
            answer["workers"].reverse()
        return answer

    @contextmanager
    def _as_the_other(self) -> Iterator[None]:
        """Let layers cut tensors by the number of the worker at the other end."""
        last = get_tp_group().world_size - 1
        modules = list(self._pipeline.modules())
        cutting = [
            each
            for each in [*modules, *self._pipeline.parameters()]
            if isinstance(getattr(each, "tp_rank", None), int)
        ]
        own = [each.tp_rank for each in cutting]
        for each in cutting:
            each.tp_rank = last - each.tp_rank
        try:
            yield
        finally:
            for each, rank in zip(cutting, own, strict=True):
                each.tp_rank = rank


def serve(arguments: Sequence[str]) -> int:
    """Serve until told to end. arguments: the file, and those of `megadiff serve`."""
    from megadiff.cli.serve import main
    from megadiff.rollout.server import omni_app

    # Workers are processes of their own, and import this module by its name.
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    os.environ[VARIABLE] = arguments[0]
    omni_app.build_engine = functools.partial(
        omni_app.build_engine, worker_extension="faulty_worker.FaultyExtension"
    )
    return main(list(arguments[1:]))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
