"""Where replicas and trainer ranks are: the transport that can serve them, and the part of a tensor
that a worker has.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadiff.sync.transports import choose
from megadiff.sync.transports.choose import build_transport
from megadiff.tensors.boxes import worker_boxes


def place(device: str, host: str = "h") -> dict:
    return {"host": host, "device": device, "boxes": {}}


@pytest.mark.parametrize(
    ("name", "replicas", "ranks", "text"),
    [
        (
            "shm",
            [[place("cpu", "other")]],
            [place("cpu")],
            "replica_0 runs on other and the trainer on h",
        ),
        (
            "shm",
            [[place("cuda:b")]],
            [place("cuda:a")],
            "replica_0 run on GPUs that no trainer rank has; set sync.transport=nccl",
        ),
        (
            "nccl",
            [[place("cuda:b")], [place("cuda:a")]],
            [place("cuda:a")],
            "the trainer's rank 0 and replica_1 .* share a GPU",
        ),
        (
            "nccl",
            [[place("cuda:b")] * 2],
            [place("cuda:a")],
            r"replica_0 \(worker 0\) and replica_0 \(worker 1\) share",
        ),
        ("nccl", [[place("cpu")]], [place("cuda:a")], "nccl between cpu and cuda"),
    ],
)
def test_places_that_a_transport_cannot_serve(name, replicas, ranks, text):
    targets = [
        SimpleNamespace(name=f"replica_{number}", url="http://127.0.0.1:1")
        for number in range(len(replicas))
    ]
    workers = {target.name: many for target, many in zip(targets, replicas, strict=True)}
    with pytest.raises(ValueError, match=text):
        build_transport(
            name,
            targets,
            workers,
            ranks=ranks,
            rank=0,
            device=torch.device("cpu"),
            folder=Path("x"),
        )


@pytest.mark.parametrize(
    ("replicas", "ranks", "name"),
    [
        ([[place("cpu")]], [place("cpu")], "http"),
        ([[place("cuda:a")], [place("cuda:b")]], [place("cuda:a"), place("cuda:b")], "shm"),
        (
            [[place("cuda:c")], [place("cuda:d", "other")]],
            [place("cuda:a"), place("cuda:b")],
            "nccl",
        ),
        (
            [[place("cuda:b"), place("cuda:c")]],
            [place("cuda:a")],
            "nccl",
        ),  # a TP replica on GPUs of its own
        (
            [[place("cuda:a"), place("cuda:b")]],
            [place("cuda:a"), place("cuda:b")],
            "http",
        ),  # NCCL takes a GPU once
        ([[place("cpu")]], [place("cuda:a")], "http"),
    ],
)
def test_the_fastest_transport_that_can_serve(replicas, ranks, name):
    workers = {f"replica_{number}": many for number, many in enumerate(replicas)}
    assert choose._fastest(workers, ranks=ranks) == name


def test_boxes_of_a_worker():
    shapes = {"column": [4, 6], "row": [4, 6], "whole": [3], "bias": [4]}
    views = {"column": [2, 6], "row": [4, 3], "whole": [3], "bias": [2]}
    assert worker_boxes(shapes, views, rank=1, size=2) == {
        "column": ((2, 4), (0, 6)),
        "row": ((0, 4), (3, 6)),
        "bias": ((2, 4),),
    }
    for view in ([2, 3], [3, 6], [24]):
        with pytest.raises(ValueError, match="which is no equal part"):
            worker_boxes({"a": [4, 6]}, {"a": view}, rank=0, size=2)
