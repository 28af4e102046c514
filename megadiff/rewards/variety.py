"""Reward variety: score how unlike the rest of its group a sample's colours are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megadiff.observe.diversity import hue_histogram, names_a_colour
from megadiff.rewards.base import Reward, RewardSample


class VarietyReward(Reward):
    """Score the mean distance of a sample's hues to those of the group's others, in [0, 1].

    The distance of two samples is half the L1 distance of their hue histograms, of the middle
    frame. A prompt that names a colour scores 0: its samples are meant to agree.
    Give it a small weight beside the reward that training is for. Policy gradients narrow what a
    prompt leaves open, because samples that agree with the most likely ones are the surest. This
    term pays for staying apart. After GARDO's diversity term, arXiv 2512.24138.
    """

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        if len(samples) < 2 or names_a_colour(samples[0].prompt.text):
            return [0.0] * len(samples)
        frames = np.stack([sample.pixels[len(sample.pixels) // 2] for sample in samples])
        shares_GB = hue_histogram(frames)
        distance_GG = 0.5 * np.abs(shares_GB[:, None] - shares_GB).sum(axis=2)
        return (distance_GG.sum(axis=1) / (len(samples) - 1)).tolist()
