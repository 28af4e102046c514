"""Whole tensors from rows that ranks hold, as torch.chunk cuts them; the ranks are played by a
stand-in for the collective.
"""

import pytest
import torch
import torch.distributed as dist

from megadiff.engines.gathering import gather_rows, runs


def test_runs_keep_the_order_and_the_limit():
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 4}
    assert list(runs(sizes, 6)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(runs({}, 6)) == []


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_rows_that_ranks_do_not_divide(ranks, monkeypatch):
    """A rank with fewer rows, or none, and tensors of any shape; each is whole again, bit for bit,
    in another dtype.
    """
    whole = [torch.randn(shape) for shape in ((3, 4), (7,), (1, 2, 3), (10, 1))]
    chunks = [torch.chunk(tensor, ranks) for tensor in whole]
    pieces = [
        [
            own[rank] if rank < len(own) else tensor[:0]
            for own, tensor in zip(chunks, whole, strict=True)
        ]
        for rank in range(ranks)
    ]
    sent = []

    def gather(out, own, group):
        """First collects what each rank would send, then answers with all of it."""
        sent.append(own.clone())
        if len(sent) >= ranks:
            out.copy_(torch.cat(sent[:ranks]))

    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda out, own, group: gather(out, own, group)
    )
    shapes = [tensor.shape for tensor in whole]
    for rank in (*range(ranks), 0):
        found = gather_rows(pieces[rank], shapes, torch.bfloat16, None)
    assert len({len(own) for own in sent}) == 1  # the same on every rank
    for tensor, held in zip(whole, found, strict=True):
        assert torch.equal(held, tensor.bfloat16())
