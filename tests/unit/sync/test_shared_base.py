"""A base that a replica maps: it lies as the replica packs it, and nothing but it is mapped."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megadiff.models.qwen_image.plan import SERVED_NAMES as QWEN
from megadiff.models.sd3.plan import SERVED_NAMES as SD3
from megadiff.models.served_names import Segments, packed_names, served_places, served_view
from megadiff.models.wan22.plan import SERVED_NAMES as WAN
from megadiff.models.z_image.plan import SERVED_NAMES as Z_IMAGE
from megadiff.sync.bucket import bucket_manifest
from megadiff.sync.shared_base import ALIGNMENT, MappedMemory, SharedBase
from megadiff.sync.transports.shared_memory import FOLDER

SEGMENTS = {"attn.to_qkv": Segments(names=("attn.to_q", "attn.to_k", "attn.to_v"), parts=(2, 1, 1))}
# vllm-omni's parameters with their shapes, of a block and around it
SERVED = {
    "blocks.0.attn.to_qkv.weight": (24, 7),
    "blocks.0.attn.to_qkv.bias": (24,),
    "blocks.0.attn.add_kv_proj.weight": (12, 5),
    "blocks.0.attn.to_out.weight": (7, 8),
    "blocks.0.attn.norm_q.weight": (4,),
    "blocks.1.attn.to_qkv.weight": (24, 7),
    "proj_out.weight": (3, 7),
}


def base_of(served: dict[str, tuple[int, ...]], names, *, dtype=torch.float32):
    """Return a base of random values, and served name → the parameter that a replica has."""
    parameters = {name: torch.randn(shape).to(dtype) for name, shape in served.items()}
    places = served_places(list(served), names=names)
    values = {name: served_view(place, parameters=parameters) for name, place in places.items()}
    # as diffusers orders them, which is not the packed order
    shapes = {name: tuple(values[name].shape) for name in sorted(values)}
    base = SharedBase(shapes, dtype=dtype, served_names=names, device=torch.device("cpu"))
    for name, tensor in base.tensors.items():
        tensor.copy_(values[name])
    return base, parameters, places


def source_of(base: SharedBase, names=None) -> dict:
    bucket = [(name, base.tensors[name]) for name in names or base.tensors]
    return {
        "tensors": bucket_manifest(bucket),
        "starts": base.starts(bucket),
        "memory": base.memory(),
    }


@pytest.mark.parametrize("names", [QWEN, SEGMENTS, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replica_sees_its_parameters(names, dtype) -> None:
    base, parameters, places = base_of(SERVED, names, dtype=dtype)
    empty = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}
    memory = MappedMemory(torch.device("cpu"))
    mapped = dict(memory.views(source_of(base), places, empty))
    assert mapped.keys() == parameters.keys()
    for name, view in mapped.items():
        assert view.is_contiguous() and view.data_ptr() % ALIGNMENT == 0
        assert torch.equal(view, parameters[name]), name
    # one mapping for all, another than the trainer's
    assert len({view.untyped_storage().data_ptr() for view in mapped.values()}) == 1

    # part of a bucket at a time, in any order
    for name in reversed(list(base.tensors)):
        ((served, view),) = memory.views(source_of(base, [name]), places, empty)
        assert torch.equal(view, parameters[served])


def test_the_replica_sees_what_changes_and_changes_nothing() -> None:
    base, parameters, places = base_of(SERVED, QWEN)
    memory = MappedMemory(torch.device("cpu"))
    mapped = dict(memory.views(source_of(base), places, parameters))
    base.tensors["proj_out.weight"][1, 2] = 5.0
    assert mapped["proj_out.weight"][1, 2] == 5.0
    mapped["proj_out.weight"].zero_()
    assert base.tensors["proj_out.weight"][1, 2] == 5.0


@pytest.mark.parametrize("names", [QWEN, SD3, WAN, Z_IMAGE])
def test_names_are_packed_as_replicas_pack_them(names) -> None:
    served = [f"blocks.{index}.{key}.weight" for index in (0, 1, 10) for key in names]
    groups: dict[str, dict[int, str]] = {}
    for name, place in served_places(served, names=names).items():
        groups.setdefault(place.parameter, {})[place.shard] = name
    expected = [[group[shard] for shard in sorted(group)] for group in groups.values()]
    mixed = sorted(name for group in expected for name in group)
    assert sorted(packed_names(mixed, names)) == sorted(expected)


def _without(source: dict, name: str) -> dict:
    return source | {"tensors": {"other": source["tensors"][name]}}


def _apart(source: dict, name: str) -> dict:
    starts = dict(source["starts"])
    starts[name] += ALIGNMENT
    return source | {"starts": starts}


def _other_shape(source: dict, name: str) -> dict:
    row = source["tensors"][name]
    return source | {"tensors": source["tensors"] | {name: row | {"shape": [9, 7]}}}


def _outside(source: dict, name: str) -> dict:
    starts = {key: start + (1 << 20) for key, start in source["starts"].items()}
    return source | {"starts": starts}


def _other_size(source: dict, name: str) -> dict:
    return source | {"memory": source["memory"] | {"num_bytes": 4096}}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, "has no tensor other"),
        (_apart, "does not lie beside the other weights of blocks.0.attn.to_qkv.weight"),
        (_other_shape, r"is float32 \[9, 7\], the replica's is torch.float32 \[8, 7\]"),
        (_outside, "of a base of"),
        (_other_size, "the trainer's base 4096"),
    ],
)
def test_what_does_not_fit_is_refused(spoil, message) -> None:
    base, parameters, places = base_of(SERVED, QWEN)
    source = spoil(source_of(base), "blocks.0.attn.to_k.weight")
    with pytest.raises(ValueError, match=message):
        dict(MappedMemory(torch.device("cpu")).views(source, places, parameters))


def test_its_file_goes_with_it() -> None:
    base, parameters, places = base_of(SERVED, QWEN)
    source = source_of(base)
    path = Path(FOLDER, source["memory"]["file"])
    memory = MappedMemory(torch.device("cpu"))
    mapped = dict(memory.views(source, places, parameters))
    del base
    gc.collect()
    assert not path.exists()
    # what is mapped stays, as a replica outlives its trainer for a moment
    assert torch.equal(mapped["proj_out.weight"], parameters["proj_out.weight"])
    with pytest.raises(ValueError, match="does not exist for this replica"):
        dict(MappedMemory(torch.device("cpu")).views(source, places, parameters))


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    before = set(FOLDER.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"bytes free, the frozen base takes \d+; give it more"):
        base_of(SERVED, QWEN)
    gc.collect()
    ours = {path for path in set(FOLDER.iterdir()) - before if f"-{os.getpid()}-" in path.name}
    assert not ours


def test_views_share_no_autograd_with_their_memory() -> None:
    base, _, _ = base_of({"proj_out.weight": (3, 7)}, {})
    tensor: Tensor = base.tensors["proj_out.weight"]
    assert not tensor._is_view() and tensor.untyped_storage().nbytes() == 3 * 7 * 4
