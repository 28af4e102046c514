"""One open call of a loader takes every bucket: it is done with a bucket when give() returns, and
fails where it fails.
"""

import threading

import pytest
import torch

from megadiff.rollout.worker.weight_feed import WeightFeed

CPU = torch.device("cpu")


class Loader:
    """Copies what it is given, as vllm-omni's do; counts its calls."""

    def __init__(self) -> None:
        self.held, self.num_calls, self.num_ends, self.thread = {}, 0, 0, None

    def load_weights(self, weights):
        self.num_calls += 1
        self.thread = threading.current_thread()
        for name, tensor in weights:
            if name == "bad":
                raise ValueError("bad shape")
            self.held[name] = tensor.clone()
        self.num_ends += 1


def test_one_call_takes_every_bucket():
    loader = Loader()
    feed = WeightFeed(loader.load_weights, CPU)
    feed.close()
    assert not loader.num_calls
    memory = torch.ones(3)
    for number in range(3):
        memory.fill_(number)
        feed.give(iter([(f"w{number}", memory)]))
        memory.fill_(-1)  # the sender's again
    feed.give(iter([]))
    assert (loader.num_calls, loader.num_ends) == (1, 0)
    feed.close()
    assert (loader.num_calls, loader.num_ends) == (1, 1) and not loader.thread.is_alive()
    assert [float(loader.held[f"w{number}"][0]) for number in range(3)] == [0, 1, 2]
    feed.give(iter([("next push", memory)]))
    feed.close()
    assert loader.num_calls == 2 and "next push" in loader.held


def test_a_failure_is_the_callers_and_the_next_bucket_starts_anew():
    loader = Loader()
    feed = WeightFeed(loader.load_weights, CPU)

    def torn():
        yield "a", torch.ones(1)
        raise KeyError("no such tensor")

    feed.give(iter([("first", torch.ones(1))]))
    for pairs, error in ((iter([("bad", torch.ones(1))]), ValueError), (torn(), KeyError)):
        with pytest.raises(error):
            feed.give(pairs)
        feed.close()
    assert loader.num_calls == 2 and loader.num_ends == 0
    feed.give(iter([("last", torch.ones(1))]))
    feed.close()
    assert loader.held.keys() == {"first", "a", "last"}


@pytest.mark.parametrize("load", [next, lambda weights: None], ids=["one", "none"])
def test_a_loader_that_returns_before_the_end_is_an_error(load):
    feed = WeightFeed(load, CPU)
    with pytest.raises(RuntimeError, match="stopped before it had taken all"):
        feed.give(iter([("a", torch.ones(1)), ("b", torch.ones(1))]))
    feed.close()
    loader = Loader()
    feed._load = loader.load_weights
    feed.give(iter([("c", torch.ones(1))]))
    feed.close()
    assert loader.held.keys() == {"c"}
