"""JSON of several ranks in one place."""

import json
from pathlib import Path

import torch.distributed as dist

from megadiff.parallel.collectives import gather_json_at
from megadiff.parallel.mesh import init_mesh, resolve_layout
from tests.distributed.ranks import run_ranks

VALUES = [None, {"name": "käse", "numbers": [0.1, 2]}, [], "a much longer text than the others'"]


def _worker(out: str, world_size: int, destination: int) -> None:
    layout = resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=world_size)
    mesh = init_mesh(layout, "cpu")
    received = gather_json_at(
        VALUES[dist.get_rank()], destination=destination, group=mesh.cpu_group
    )
    (Path(out) / f"{mesh.rank}.json").write_text(json.dumps({"received": received}))


def _received(folder: Path, world_size: int) -> list[object]:
    texts = [(folder / f"{rank}.json").read_text() for rank in range(world_size)]
    return [json.loads(text)["received"] for text in texts]


def test_the_destination_alone_receives_all_values(tmp_path):
    run_ranks(_worker, 4, str(tmp_path), 4, 1)
    assert _received(tmp_path, 4) == [None, VALUES, None, None]


def test_a_single_rank_receives_its_own_value(tmp_path):
    run_ranks(_worker, 1, str(tmp_path), 1, 0)
    assert _received(tmp_path, 1) == [VALUES[:1]]
