"""Prepare the next rollout call while the GPU draws this one: its texts' encodings and its noise.

A text encoder is many small kernels, which the host starts one by one: 45 ms a call of Qwen-Image
in which the GPU would do next to nothing. The replica's server writes a file that says which call
waits, and its worker reads it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from megadiff.models.pipeline_base import CallInputs
from megadiff.rollout.wire import requests_from_json, requests_to_json
from megadiff.types import RolloutRequest

logger = logging.getLogger(__name__)
NEXT_NAME = "next.json"  # of the file, beside those that stop a request
POLL_S = 0.002


class WaitingCalls:
    """Tell the worker which call comes after the one that it draws: the server's side.

    folder: the replica's own.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / NEXT_NAME
        # in the order in which the engine draws them
        self._calls: list[Sequence[RolloutRequest]] = []

    @contextmanager
    def waiting(self, requests: Sequence[RolloutRequest]) -> Iterator[None]:
        """Count a call as waiting or drawn until the block ends."""
        self._calls.append(requests)
        self._tell()
        try:
            yield
        finally:
            self._calls = [call for call in self._calls if call is not requests]
            self._tell()

    def _tell(self) -> None:
        """Write the call behind the first one, for NextCall.prepare()."""
        # a full disk is told of elsewhere; without the file a call takes a little longer
        with suppress(OSError):
            # given images take the VAE, which is no small kernel
            if len(self._calls) < 2 or self._calls[1][0].images:
                self._file.unlink(missing_ok=True)
                return
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(requests_to_json(self._calls[1])))
            part.replace(self._file)


class NextCall:
    """Hold one call's inputs, prepared before its turn: the worker's side.

    folder: the replica's own. device: the pipeline's.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._file = folder / NEXT_NAME
        self._device = device
        self._prepared: tuple[list[RolloutRequest], CallInputs] | None = None
        # The host waits for this stream where it copies a text's tokens, not for the drawing one.
        # Its kernels are small and come first.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def take(self, requests: Sequence[RolloutRequest]) -> CallInputs | None:
        """Return the inputs of these requests if they are what was prepared; drop any others."""
        prepared = self._prepared
        self._prepared = None
        if prepared is None or prepared[0] != list(requests):
            return None
        inputs = prepared[1]
        if self._stream:
            drawing = torch.cuda.current_stream(self._device)
            drawing.wait_stream(self._stream)
            for tensor in inputs.conditioning.values():
                if tensor.is_cuda:
                    tensor.record_stream(drawing)
        return inputs

    def prepare(
        self,
        current: Sequence[RolloutRequest],
        make_inputs: Callable[[Sequence[RolloutRequest]], CallInputs],
    ) -> None:
        """Make the inputs of the call that waits, if one comes before the GPU is done.

        current: what the GPU draws now.
        """
        requests = self._waiting(current)
        if not requests:
            return

        try:
            with torch.cuda.stream(self._stream):
                self._prepared = (requests, make_inputs(requests))
        except ValueError:
            pass  # what is wrong with that call is told when its turn comes
        # the call that is drawn now is not to blame
        except Exception:
            logger.warning("the next call could not be prepared meanwhile", exc_info=True)

    def drop(self) -> None:
        """Forget what is prepared, before weights change or go."""
        self._prepared = None
        if self._stream:
            self._stream.synchronize()

    def _waiting(self, current: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests that the file names, and wait for it while the GPU is busy."""
        done = torch.cuda.Event() if self._stream else None
        if done:
            done.record()
        while True:
            requests = _read(self._file)
            # the server may not have heard yet that the call before is over
            if requests and requests != list(current):
                return requests
            if done is None or done.query():
                return []
            time.sleep(POLL_S)


def _read(file: Path) -> list[RolloutRequest]:
    """Return the requests, none where there is no file."""
    with suppress(OSError, ValueError):
        return requests_from_json(json.loads(file.read_bytes()))
    return []
