"""A user's own reward that breaks at its third group."""

from megadiff.rewards.base import Reward


class FailingReward(Reward):
    calls = -1  # the first is not of a group: every reward is tried out

    def score(self, samples):
        FailingReward.calls += 1
        if FailingReward.calls > 8:
            raise RuntimeError("the judge is out")
        return [sample.pixels.mean() / 255 for sample in samples]
