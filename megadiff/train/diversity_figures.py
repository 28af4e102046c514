"""Look at a step's samples while the policy trains on them: how unlike, and signs of hacking.

Shrinking 128 pictures of 512² takes a core 0.1 s. A GPU trains meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from megadiff.observe import diversity
from megadiff.parallel.collectives import all_reduce_sums
from megadiff.parallel.mesh import Mesh
from megadiff.types import Figures, RolloutGroup


class DiversityFigures:
    """Look at one rank's groups in a thread, from now on.

    Of videos the middle frame is looked at, and how much they move.
    """

    def __init__(self, groups: Sequence[RolloutGroup]) -> None:
        with_thread = ThreadPoolExecutor(1, thread_name_prefix="diversity")
        self._sums = with_thread.submit(diversity_sums, groups)
        with_thread.shutdown(wait=False)  # the thread ends with its work

    def metrics(self, mesh: Mesh) -> Figures:
        """Return means over all ranks' groups. Collective.

        Diversity of colour is that of prompts that name none, and missing without one. So is the
        motion of videos.
        """
        sums = all_reduce_sums(self._sums.result(), mesh.cpu_group)
        counts = {name: sums.pop(f"{name}_count") for name in ("group", "open", "video")}
        count_of = {"colour_entropy_bit": counts["open"], "motion": counts["video"]}

        means = {}
        for name, value in sums.items():
            if count := count_of.get(name, counts["group"]):
                means[f"diversity/{name}"] = value / count
        return means


def diversity_sums(groups: Sequence[RolloutGroup]) -> Figures:
    """Return sums over the groups, and what they are divided by: `…_count`.

    All keys are there without any group too, as an all-reduce takes equal keys from all ranks.
    """
    others = ("pixel_spread", "clipped_share", "colour_entropy_bit", "motion")
    counts = ("group_count", "open_count", "video_count")
    sums = dict.fromkeys((*diversity.LOOKS, *others, *counts), 0.0)
    alike: dict[tuple[int, ...], list[NDArray[np.uint8]]] = defaultdict(list)  # by shape

    for group in groups:
        frames_GHWC = group.middle_frames_GHWC
        small = diversity.thumbnails(frames_GHWC)
        alike[small.shape].append(small)
        sums["pixel_spread"] += diversity.pixel_spread(small)
        sums["clipped_share"] += diversity.clipped_share(frames_GHWC)
        sums["group_count"] += 1

        if not diversity.names_a_colour(group.prompt.text):
            sums["colour_entropy_bit"] += diversity.colour_entropy_bit([small])
            sums["open_count"] += 1
        if group.pixels_GFHWC.shape[1] > 1:
            sums["motion"] += fmean(map(diversity.motion, group.pixels_GFHWC))
            sums["video_count"] += 1

    for thumbnails in alike.values():
        # At once: a call a group would mostly be the calls' own time.
        for name, value in diversity.looks(np.concatenate(thumbnails)).items():
            sums[name] += value * len(thumbnails)
    return sums
