"""Pieces on disk make up the same tensors for every reader's layout, and damage is named."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.engines.lora import check_source
from megadiff.parallel.plan import ParallelPlan
from megadiff.tensors import shard_index, shards
from megadiff.tensors.covering import cover
from megadiff.tensors.flat_shards import flat_shards
from megadiff.tensors.manifest import folder_manifest
from megadiff.tensors.shards import Shard, ShardFolder, shard_file
from megadiff.tensors.snapshot import Snapshot
from megadiff.tensors.source_folder import SourceFolder
from megadiff.tensors.tensor_file import TensorFile

FULL = {
    "a": torch.arange(35, dtype=torch.float32).reshape(7, 5) / 3,
    "b": torch.arange(6).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
}


def _rows(full: Tensor, bounds: list[int], rank: int) -> Shard:
    begin, end = bounds[rank], bounds[rank + 1]
    return Shard(
        local=full[begin:end].clone(),
        offsets=(begin, *[0] * (full.ndim - 1)),
        shape=tuple(full.shape),
    )


def _write(folder: Path) -> None:
    """Two ranks with uneven rows; the second holds none of the scalar's."""
    for rank in range(2):
        shards = {
            "a": [_rows(FULL["a"], [0, 4, 7], rank)],
            "b": [_rows(FULL["b"], [0, 6, 6], rank)],
        }
        if rank == 0:
            shards["scalar"] = [Shard(local=FULL["scalar"], offsets=(), shape=())]
        Snapshot(shards=shards, rank=rank, num_files=2, values={"step": 3}).write(folder)


@pytest.mark.parametrize("bounds", [[0, 7], [0, 4, 7], [0, 3, 6, 7, 7], [0, 1, 5, 7]])
def test_every_layout_reads_the_same_bits(tmp_path, bounds):
    _write(tmp_path)
    source = ShardFolder(tmp_path)
    assert source.values == {"step": 3}
    assert source.shapes == {"a": (7, 5), "b": (6,), "scalar": ()}
    for rank, _ in enumerate(pairwise(bounds)):
        shard = _rows(torch.zeros(7, 5), bounds, rank)
        source.read_into("a", shard)
        assert torch.equal(shard.local, FULL["a"][bounds[rank] : bounds[rank + 1]])


def test_columns_and_scalars_and_other_dtypes(tmp_path):
    _write(tmp_path)
    source = ShardFolder(tmp_path)
    columns = Shard(local=torch.zeros(7, 2), offsets=(0, 3), shape=(7, 5))
    scalar, wide = Shard(local=torch.zeros(()), offsets=(), shape=()), torch.zeros(6)
    source.read_into("a", columns)
    source.read_into("scalar", scalar)
    source.read_into(
        "b", Shard(local=wide, offsets=(0,), shape=(6,))
    )  # held in bfloat16, and written as all is
    assert torch.equal(columns.local, FULL["a"][:, 3:])
    assert scalar.local == 2.5
    assert torch.equal(wide, FULL["b"].float())


CUBE = torch.arange(3 * 4 * 5, dtype=torch.float32).reshape(3, 4, 5) + 0.5


@pytest.mark.parametrize("shape", [(60,), (12, 5), (3, 4, 5), (1, 60), (60, 1)])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 60), (0, 5), (7, 9), (7, 13), (20, 40), (19, 58), (59, 60), (30, 30)]
)
def test_flat_range_of_a_box_is_cut_into_few_pieces_that_share_its_memory(shape, start, stop):
    offsets = tuple(range(1, len(shape) + 1))
    box = Shard(
        local=torch.empty(shape, device="meta"),
        offsets=offsets,
        shape=tuple(size + 7 for size in shape),
    )
    flat = torch.arange(start, stop, dtype=torch.float32)
    pieces = flat_shards(flat, start, box)
    assert len(pieces) <= 2 * len(shape) - 1
    full = torch.full(box.shape, -1.0)
    for piece in pieces:
        assert piece.shape == box.shape
        place = tuple(
            slice(at, at + size) for at, size in zip(piece.offsets, piece.local.shape, strict=True)
        )
        assert bool((full[place] == -1).all())
        full[place] = piece.local
        piece.local.zero_()
    in_box = full[
        tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
    ].reshape(-1)
    assert torch.equal(in_box[start:stop], torch.arange(start, stop, dtype=torch.float32))
    assert int((full != -1).sum()) == stop - start
    assert not flat.any()


@pytest.mark.parametrize("cuts", [[0, 60], [0, 17, 60], [0, 1, 29, 30, 60]])
@pytest.mark.parametrize("wanted", [[0, 60], [0, 33, 60], [0, 2, 26, 59, 60]])
def test_ranges_written_by_some_ranks_are_read_by_others(tmp_path, cuts, wanted):
    box = Shard(local=CUBE.to("meta"), offsets=(0, 0, 0), shape=(3, 4, 5))
    ranges = [(begin, CUBE.reshape(-1)[begin:end]) for begin, end in pairwise(cuts)]
    for rank, (begin, flat) in enumerate(ranges):
        Snapshot(
            shards={"cube": flat_shards(flat, begin, box)}, rank=rank, num_files=len(ranges)
        ).write(tmp_path)
    source = ShardFolder(tmp_path)
    assert source.shapes == {"cube": (3, 4, 5)}
    for begin, end in pairwise(wanted):
        flat = torch.zeros(end - begin)
        for piece in flat_shards(flat, begin, box):
            source.read_into("cube", piece)
        assert torch.equal(flat, CUBE.reshape(-1)[begin:end])


def test_files_of_another_format_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shards, "FORMAT", 3)
        _write(tmp_path)
    with pytest.raises(ValueError, match="has format 3, this version of megadiff reads format 4"):
        _read_all(tmp_path)
    _write(tmp_path)
    file = shard_file(tmp_path, 1)
    save_file({"a": FULL["a"]}, file)
    with pytest.raises(
        ValueError,
        match="rank_00001.safetensors is a safetensors file, but not one of a checkpoint",
    ):
        _read_all(tmp_path)


def test_files_are_plain_safetensors(tmp_path):
    _write(tmp_path)
    assert torch.equal(load_file(shard_file(tmp_path, 1))["a"], FULL["a"][4:])


def _read_all(folder: Path) -> None:
    source = ShardFolder(folder)
    for name, full in FULL.items():
        source.read_into(
            name,
            Shard(local=torch.zeros(full.shape), offsets=(0,) * full.ndim, shape=tuple(full.shape)),
        )


def test_truncated_file_is_named(tmp_path):
    _write(tmp_path)
    file = shard_file(tmp_path, 1)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="rank_00001.safetensors is truncated: tensor 'a'"):
        _read_all(tmp_path)


def test_flipped_bit_is_named(tmp_path):
    _write(tmp_path)
    file = shard_file(tmp_path, 1)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"rank_00001.safetensors: tensor 'a' does not match its fingerprint"
    ):
        _read_all(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_file_is_named(tmp_path, rank):
    _write(tmp_path)
    shard_file(tmp_path, rank).unlink()
    with pytest.raises(ValueError, match=f"rank_0000{rank}.safetensors is missing"):
        _read_all(tmp_path)


def test_pieces_that_do_not_cover_their_tensor_once_are_refused_at_opening(tmp_path):
    """As many elements as the tensor has are not enough: rows 2, 3 come twice, 5 and 6 never."""
    rows = [
        Shard(local=torch.zeros(size, 5), offsets=(begin, 0), shape=(7, 5))
        for begin, size in ((0, 4), (2, 3))
    ]
    Snapshot(shards={"a": rows[:1]}, rank=0, num_files=1).write(tmp_path)
    with pytest.raises(ValueError, match="20 of the 35 elements of 'a'.*incomplete"):
        ShardFolder(tmp_path)
    Snapshot(shards={"a": rows}, rank=0, num_files=1).write(tmp_path)
    with pytest.raises(ValueError, match="2 pieces of 'a', of 35 elements in all, do not cover"):
        ShardFolder(tmp_path)


@pytest.mark.parametrize("shape", [(), (6,), (4, 5), (3, 4, 3)])
def test_covering_is_what_counting_every_element_says(shape):
    rng = random.Random(len(shape))
    seen = Counter()
    for _ in range(300):
        boxes = _cut([((0,) * len(shape), shape)], rng)
        harm = rng.choice(("none", "move", "drop", "double"))
        index = rng.randrange(len(boxes))
        if harm == "move" and shape:
            offsets, sizes = boxes[index]
            boxes[index] = (tuple(at + rng.choice((-1, 0, 1)) for at in offsets), sizes)
        elif harm == "drop":
            del boxes[index]
        elif harm == "double":
            boxes.append(boxes[index])
        counts = Counter(place for offsets, sizes in boxes for place in _elements(offsets, sizes))
        is_cover = counts == Counter(_elements((0,) * len(shape), shape))
        assert cover(boxes, shape) == is_cover, boxes
        seen[is_cover] += 1
    assert min(seen[True], seen[False]) > 20


def _cut(boxes, rng):
    """Halve boxes at random; some of the halves are empty."""
    for _ in range(rng.randrange(6)):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(sizes)) if sizes else None
        if axis is None:
            return [(offsets, sizes)]
        cut = rng.randrange(sizes[axis] + 1)
        second = tuple(at + cut * (dim == axis) for dim, at in enumerate(offsets))
        lower = tuple(cut if dim == axis else size for dim, size in enumerate(sizes))
        upper = tuple(size - cut * (dim == axis) for dim, size in enumerate(sizes))
        boxes += [(offsets, lower), (second, upper)]
    return boxes


def _elements(offsets, sizes):
    axes = [range(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
    return product(*axes)


def test_files_of_two_checkpoints_are_not_mixed(tmp_path):
    for name, step in (("old", 3), ("new", 4)):
        for rank in range(2):
            shard = _rows(FULL["a"], [0, 4, 7], rank)
            values = {"step": step}
            Snapshot(shards={"a": [shard]}, rank=rank, num_files=2, values=values).write(
                tmp_path / name
            )
    shard_file(tmp_path / "old", 1).rename(shard_file(tmp_path / "new", 1))
    with pytest.raises(ValueError, match=r"rank_00001.safetensors has values=\{'step': 3\}, but"):
        ShardFolder(tmp_path / "new")


def test_a_shard_of_many_takes_little_memory(tmp_path):
    """A rank knows the shards of all ranks, which may be millions."""
    num_files = 10
    num_tensors = 300
    for rank in range(num_files):
        piece = Shard(local=torch.ones(1, 4), offsets=(rank, 0), shape=(num_files, 4))
        tensors = {
            f"model/transformer.blocks.{i}.attn.to_q.weight": [piece] for i in range(num_tensors)
        }
        Snapshot(shards=tensors, rank=rank, num_files=num_files).write(tmp_path)
    ShardFolder(tmp_path)  # what is imported and interned once does not count

    tracemalloc.start()
    folder = ShardFolder(tmp_path)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(folder.shapes) == num_tensors
    assert taken / (num_files * num_tensors) < 600  # bytes; 1,100 with objects of their own


def test_opening_a_checkpoint_does_not_collect_garbage_and_leaves_that_on(tmp_path, monkeypatch):
    _write(tmp_path)
    collects = []
    original = shard_index.stored_shards

    def noted(*arguments):
        collects.append(gc.isenabled())
        return original(*arguments)

    monkeypatch.setattr(shards, "stored_shards", noted)
    ShardFolder(tmp_path)
    assert collects == [False, False] and gc.isenabled()
    shard_file(tmp_path, 1).unlink()
    with pytest.raises(ValueError, match="is missing"):
        ShardFolder(tmp_path)
    assert gc.isenabled()


@pytest.mark.parametrize("value", [1.0, True, "1", None])
def test_what_equals_a_known_number_is_not_taken_for_it(tmp_path, value):
    """Boxes share their numbers, and in Python 1, 1.0 and True are equal."""
    _write(tmp_path)
    file = TensorFile(shard_file(tmp_path, 0))
    entry = {"tensor": "a", "shape": [7, 5], "offsets": [1, 0], "local_shape": [4, 5]}
    known = {(1, 0): (1, 0)}
    odd = {"tensors": {key: {**entry, "offsets": [value, 0]} for key in file.tensors}}
    with pytest.raises(ValueError, match="is corrupt: of 'a' its metadata says"):
        list(shard_index.stored_shards(file, odd, known))


def test_unknown_and_misshapen_tensors_are_named(tmp_path):
    shard = Shard(local=torch.zeros(7, 5), offsets=(0, 0), shape=(7, 5))
    Snapshot(shards={"a": [shard]}, rank=0, num_files=1).write(tmp_path)
    source = ShardFolder(tmp_path)
    with pytest.raises(ValueError, match="no tensor 'c'"):
        source.read_into("c", shard)
    with pytest.raises(ValueError, match=r"'a' has shape \(7, 5\), but this model's is \(5, 5\)"):
        source.read_into("a", Shard(local=torch.zeros(5, 5), offsets=(0, 0), shape=(5, 5)))
    with pytest.raises(ValueError, match="float32, but this engine holds it as torch.bfloat16"):
        source.read_into(
            "a", Shard(local=torch.zeros(2, 5, dtype=torch.bfloat16), offsets=(0, 0), shape=(7, 5))
        )


@pytest.mark.parametrize("num_files", [1, 2])
def test_source_folder_reads_slices(tmp_path, num_files):
    _write_source(tmp_path, num_files)
    source = SourceFolder(tmp_path)
    source.check_names({"a": (7, 5), "b": (6,)})
    shard = Shard(local=torch.zeros(2, 5), offsets=(4, 0), shape=(7, 5))
    source.read_into("a", shard)
    assert torch.equal(shard.local, FULL["a"][4:6])
    as_float = Shard(local=torch.zeros(6), offsets=(0,), shape=(6,))
    source.read_into("b", as_float)
    assert torch.equal(as_float.local, FULL["b"].float())


def test_source_folder_names_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="holds neither"):
        SourceFolder(tmp_path)
    _write_source(tmp_path, 2)
    problems = r"missing c; not in the model: b; a has shape \(7, 5\), the model's is \(5, 7\)"
    with pytest.raises(ValueError, match=problems):
        SourceFolder(tmp_path).check_names({"a": (5, 7), "c": (1,)})
    (tmp_path / "part1.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="part1.safetensors .* is not a whole safetensors file"):
        SourceFolder(tmp_path).check_names({"a": (7, 5), "b": (6,)})
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks part1.safetensors"):
        SourceFolder(tmp_path).check_names({"a": (7, 5), "b": (6,)})


def test_constants_are_read_into_buffers_and_are_in_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    _write_source(tmp_path / "transformer", 1)
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(7, 5))
    module.register_parameter("b", torch.nn.Parameter(torch.zeros(6)))
    source = SourceFolder(tmp_path / "transformer")
    plan = ParallelPlan(rules={}, constants=("a",))

    check_source(source, module, plan)
    source.read_constants(module, plan.constants)
    assert torch.equal(module.a, FULL["a"]) and not module.b.any()
    manifest = folder_manifest(tmp_path, ("transformer",), dtype="float32", plan=plan)
    assert list(manifest) == ["transformer.b"]
    module.register_buffer("a", torch.zeros(7, 6))
    with pytest.raises(ValueError, match=r"a has shape \(7, 5\), the model's is \(7, 6\)"):
        check_source(source, module, plan)


def _write_source(folder: Path, num_files: int) -> None:
    if num_files == 1:
        save_file({"a": FULL["a"], "b": FULL["b"]}, folder / "diffusion_pytorch_model.safetensors")
        return
    save_file({"a": FULL["a"]}, folder / "part0.safetensors")
    save_file({"b": FULL["b"]}, folder / "part1.safetensors")
    index = {"weight_map": {"a": "part0.safetensors", "b": "part1.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
