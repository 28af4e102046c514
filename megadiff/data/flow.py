"""Which images a step of flow matching takes, and the noise they get: endless, resumable, the same for every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megadiff.data.latents import LatentDataset
from megadiff.data.sampler import EpochOrder
from megadiff.diffusion.noise import row_normals
from megadiff.types import FlowBatch, Sampling


class FlowBatches:
    """Iterator over this data-parallel rank's FlowBatch of every step; the next one is made in the background.

    Each image comes draws_per_image times in a step, each time with its own noise, sigma and caption drop: functions of
    (seed, place in the global order) alone. sigma is logit-normal(0, 1) and then shifted (ModelAdapter.shift).
    """

    def __init__(
        self,
        dataset: LatentDataset,
        *,
        images_per_step: int,
        draws_per_image: int,
        caption_drop: float,
        sampling: Sampling,
        shift: Callable[[Tensor], Tensor],
        dp: int,
        dp_rank: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        assert images_per_step % dp == 0, f"{images_per_step} images over dp={dp}"
        self._dataset, self._sampling, self._shift, self._seed = dataset, sampling, shift, seed
        self._images_per_step, self._draws, self._caption_drop = images_per_step, draws_per_image, caption_drop
        self._num_local = images_per_step // dp
        self._first = dp_rank * self._num_local
        self._order = EpochOrder(len(dataset), seed=seed, shuffle=shuffle)
        self._position = 0  # images taken so far, over all ranks
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._next: tuple[int, Future[FlowBatch]] | None = None

    def __iter__(self) -> FlowBatches:
        return self

    def __next__(self) -> FlowBatch:
        position = self._position
        self._position += self._images_per_step
        made_for, future = self._next or (None, None)
        batch = future.result() if future is not None and made_for == position else self._batch(position)
        self._next = (self._position, self._pool.submit(self._batch, self._position))
        return batch

    def state(self) -> dict[str, int]:
        """Where the iterator stands; equal on every rank."""
        return self._order.state(self._position)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from state(), under any dp. ValueError if the order of images would be another."""
        self._position = self._order.position(state)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, position: int) -> FlowBatch:
        rows_N = torch.from_numpy(self._order.take(position + self._first, self._num_local))
        rows_N = rows_N.repeat_interleave(self._draws)
        latents_NLC = self._dataset.latents(rows_N)
        sigma_N = self._shift(torch.sigmoid(self._normals((), position, "sigma").double())).float()
        dropped_N = torch.special.ndtr(self._normals((), position, "drop")) < self._caption_drop
        conditioning, group_index_N = self._dataset.conditioning(rows_N, dropped_N)
        return FlowBatch(
            latents_NLC=latents_NLC,
            noise_NLC=self._normals(tuple(latents_NLC.shape[1:]), position, "noise"),
            sigma_N=sigma_N,
            weights_N=torch.ones(len(rows_N)),
            group_index_N=group_index_N,
            conditioning=conditioning,
            sampling=self._sampling,
            denominator=float(self._images_per_step * self._draws),
        )

    def _normals(self, shape: tuple[int, ...], position: int, purpose: str) -> Tensor:
        """[N, *shape] for this rank's rows of the step."""
        return row_normals(
            shape,
            first=self._first * self._draws,
            count=self._num_local * self._draws,
            key=f"{self._seed}/{position}/flow/{purpose}",
        )
