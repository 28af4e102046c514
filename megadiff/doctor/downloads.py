"""Find files of a model folder that are not whole, by their headers and sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megadiff.doctor.finding import Finding, error, ok, warning
from megadiff.process.words import counted
from megadiff.tensors.tensor_file import LENGTH_BYTES

LFS_POINTER = b"version https://git-lfs"
LEAST_SHARE = 0.99  # of an index's total_size; published ones count tied weights twice
INDEX_SUFFIX = ".safetensors.index.json"
SHOWN = 4  # files or tensors that one finding lists


def download_findings(folder: Path) -> Iterator[Finding]:
    """Yield a finding for every file that was not fetched to its end, or one that says all are."""
    problems = [*_unfinished(folder), *_cut_short(folder), *_indexes(folder)]
    yield from problems
    count = len(list(folder.rglob("*.safetensors")))
    if count and not problems:
        yield ok("download", f"{count} of {count} weight files are as long as their headers say")


def _unfinished(folder: Path) -> Iterator[Finding]:
    """Yield what the hub's client leaves where it was stopped."""
    folders = [folder]
    if folder.parent.name == "snapshots":
        folders.append(folder.parent.parent / "blobs")  # the hub's cache, to which files link
    for searched in folders:
        paths = sorted(searched.rglob("*.incomplete"))
        if paths:
            text = f"{counted(len(paths), 'unfinished file')}, 0 should be there: {_names(paths)}"
            yield error("download", text, fix="run the same `hf download` again; it goes on")


def _names(paths: list[Path]) -> str:
    more = ", …" if len(paths) > SHOWN else ""
    return ", ".join(path.name for path in paths[:SHOWN]) + more


def _cut_short(folder: Path) -> Iterator[Finding]:
    for path in sorted(folder.rglob("*.safetensors")):
        if not path.exists():
            text = f"{path} links to {path.readlink()}, which is not there"
            yield error("download", text, fix="run the same `hf download` again")
            continue
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        size = path.stat().st_size
        if start == LFS_POINTER:
            text = f"{path} has {size} bytes: a pointer of git-lfs, not its file"
            yield error("download", text, fix="git lfs pull, in the model's folder")
            continue
        # by its header, or of the header alone where that is cut short itself
        length, header = _header(path)
        expected = LENGTH_BYTES + length + _data_bytes(header)
        if size < expected:
            text = f"{path} has {size} bytes of {expected}"
            fix = f"fetch it again: hf download REPOSITORY {path.relative_to(folder)}"
            yield error("download", text, fix=fix)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return a header's length in bytes and its entries, {} where it is cut short or none."""
    size = path.stat().st_size

    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if LENGTH_BYTES + length > size:
            return length, {}

        try:
            header = json.loads(file.read(length))
        except ValueError:
            # no header at all, which opening the file tells
            return 0, {}

    return length, header if isinstance(header, dict) else {}


def _indexes(folder: Path) -> Iterator[Finding]:
    for index in sorted(folder.rglob(f"*{INDEX_SUFFIX}")):
        try:
            content = json.loads(index.read_text("utf-8"))
            yield from _index(index, content["weight_map"], content.get("metadata") or {})
        except (ValueError, KeyError, TypeError, AttributeError):
            text = f"{index} is no index of {index.stat().st_size} bytes: it lacks a weight_map"
            yield error("download", text, fix="fetch it again")


def _index(index: Path, weight_map: dict[str, str], metadata: dict[str, Any]) -> Iterator[Finding]:
    headers = {}
    for name in sorted(set(weight_map.values())):
        path = index.with_name(name)
        if path.is_file():
            _, headers[name] = _header(path)

    # a file that is absent is told by the check of the folder
    absent = [
        tensor
        for tensor, name in weight_map.items()
        if headers.get(name) and tensor not in headers[name]
    ]
    if absent:
        text = f"{index} lists {len(weight_map)} tensors, {len(absent)} are not in their files: "
        text += ", ".join(absent[:SHOWN])
        yield error("download", text, fix="fetch index and files of one revision again")

    total = metadata.get("total_size", 0)
    stored = sum(_data_bytes(header) for header in headers.values())
    is_whole = len(headers) == len(set(weight_map.values())) and all(headers.values())
    if is_whole and not absent and stored < LEAST_SHARE * total:
        text = f"the files of {index} hold {stored} bytes of {total}"
        yield warning("download", text, fix="fetch index and files of one revision again")


def _data_bytes(header: dict[str, Any]) -> int:
    """Return where the last tensor's data ends; 0 for a header that is none, told elsewhere."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    try:
        return max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (KeyError, IndexError, TypeError, ValueError):
        return 0
