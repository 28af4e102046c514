"""Draw the images or pairs of a supervised step and their noise, the same for every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megadiff.data.latents import LatentDataset
from megadiff.data.sampler import EpochOrder
from megadiff.diffusion.noise import row_normals
from megadiff.types import FlowBatch, Sampling, Shape


class FlowBatches(EpochOrder, Iterator[FlowBatch]):
    """Iterate endlessly over this rank's FlowBatch of every step; a thread makes the next one.

    An item is images_per_item consecutive rows of the dataset: an image, or the chosen and the
    rejected one of a pair, which are rows 2i and 2i + 1 of the batch. It comes draws_per_item times
    in a step, each time with noise, sigma and caption drop of its own, which its images have in
    common. They follow from (seed, items taken before this step, index in the step) alone, so they
    are the same for every dp.
    sigma: logit-normal(0, 1), then shifted (ModelAdapter.shift).
    caption_drop: fraction of rows that get the empty caption.
    """

    def __init__(
        self,
        dataset: LatentDataset,
        *,
        items_per_step: int,
        draws_per_item: int,
        caption_drop: float,
        sampling: Sampling,
        shift: Callable[[Tensor], Tensor],
        dp: int,
        dp_rank: int,
        seed: int,
        shuffle: bool,
        source: str = "data.images",
        images_per_item: int = 1,
    ) -> None:
        assert items_per_step % dp == 0, f"{items_per_step} items over dp={dp}"
        digest = dataset.captions_digest
        num_items = len(dataset) // images_per_item
        super().__init__(num_items, seed=seed, shuffle=shuffle, source=source, digest=digest)

        self._dataset = dataset
        self._sampling = sampling
        self._shift = shift
        self._items_per_step = items_per_step
        self._draws = draws_per_item
        self._images_per_item = images_per_item
        # A standard normal is below it as often as captions are dropped.
        self._drop_below = torch.special.ndtri(torch.tensor(caption_drop, dtype=torch.float64))

        self._num_local = items_per_step // dp
        self._first = dp_rank * self._num_local
        # One thread: the next batch is drawn while this one trains.
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._ahead: tuple[int, Future[FlowBatch]] | None = None  # the batch of a position

    def __next__(self) -> FlowBatch:
        made_for, batch = self._ahead or (None, None)
        # load_state() moves the position: the batch that was made ahead is then of no use.
        if batch is None or made_for != self._position:
            batch = self._pool.submit(self._batch, self._position)
        self._position += self._items_per_step
        self._ahead = (self._position, self._pool.submit(self._batch, self._position))
        return batch.result()

    def close(self) -> None:
        """End the thread, after the batch that it is making."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, position: int) -> FlowBatch:
        # All draws of an item follow each other, as the samples of a group do in RL.
        items = torch.from_numpy(self.take(position + self._first, self._num_local))
        items = items.repeat_interleave(self._draws)
        rows = items[:, None] * self._images_per_item + torch.arange(self._images_per_item)
        rows_N = rows.flatten()

        latents_NLC = self._dataset.latents(rows_N)
        normals_N = self._normals((), position, "sigma")
        dropped_N = self._normals((), position, "drop") < self._drop_below
        conditioning, group_index_N = self._dataset.conditioning(rows_N, dropped_N)

        return FlowBatch(
            latents_NLC=latents_NLC,
            noise_NLC=self._normals(tuple(latents_NLC.shape[1:]), position, "noise"),
            sigma_N=self._shift(torch.sigmoid(normals_N.double())).float(),
            advantages_N=torch.ones(len(rows_N)),
            weights_N=torch.ones(len(rows_N)),
            group_index_N=group_index_N,
            conditioning=conditioning,
            sampling=self._sampling,
            denominator=float(self._items_per_step * self._draws * self._images_per_item),
        )

    def _normals(self, shape: Shape, position: int, purpose: str) -> Tensor:
        """Draw [N, *shape] for this rank's rows, the same for the images of an item.

        Another purpose gives other numbers.
        """
        normals = row_normals(
            shape,
            first=self._first * self._draws,
            count=self._num_local * self._draws,
            key=f"{self.seed}/{position}/flow/{purpose}",
        )
        return normals.repeat_interleave(self._images_per_item, dim=0)
