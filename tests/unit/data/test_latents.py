"""The cache of latents: right numbers, found again, shared by ranks, and never half of it taken for
whole.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megadiff.data import latents as cache_module
from megadiff.data.images import open_images
from megadiff.data.latents import EMPTY_CAPTION, LatentDataset, encode_dataset
from megadiff.data.row_files import RowTable, RowWriter
from megadiff.models.registry import build_adapter
from megadiff.parallel.collectives import AgreedError
from megadiff.parallel.mesh import Mesh, init_mesh, resolve_layout
from tests.distributed.ranks import run_ranks
from tests.encoding import encode_prompts
from tests.meshes import one_rank_mesh

CAPTIONS = ["a red circle", "a blue square on a white wall", "a red circle", "红色的圆", "a dog"]
ALL = torch.arange(len(CAPTIONS))
NONE = torch.zeros(len(CAPTIONS), dtype=torch.bool)


def init_alone(world_size: int = 1) -> Mesh:
    return init_mesh(resolve_layout(dp=0, sp=1, tp=1, dp_replicate=1, world_size=world_size), "cpu")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return one_rank_mesh()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(len(CAPTIONS)):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = [{"image": f"{number}.png", "text": caption} for number, caption in enumerate(CAPTIONS)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def encode(images: Path, model: Path, folder: Path, mesh: Mesh, **options: object) -> LatentDataset:
    settings = {
        "height": 32,
        "width": 32,
        "max_chars": 100,
        "dtype": torch.float32,
        "batch": 2,
    } | options
    source, adapter = open_images(str(images), seed=0), build_adapter(model)
    return encode_dataset(
        source, adapter, folder=folder, device=torch.device("cpu"), mesh=mesh, **settings
    )


def folders(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


def test_rows_are_what_the_adapter_gives(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh
) -> None:
    dataset = encode(images, tiny_model, tmp_path / "cache", mesh)
    adapter, source = build_adapter(tiny_model), open_images(str(images), seed=0)
    blocks = source.blocks(0, len(source), size=8, height=32, width=32)
    pixels_BHWC = torch.cat([torch.from_numpy(block.pixels_BHWC) for block in blocks])
    with adapter.image_encoder(dtype=torch.float32, device=torch.device("cpu")) as encoder:
        expected_BLC = encoder(pixels_BHWC)
    assert (len(dataset), dataset.latents(ALL).dtype) == (5, torch.float32)
    torch.testing.assert_close(dataset.latents(ALL), expected_BLC, atol=1e-5, rtol=0)
    assert torch.equal(dataset.latents(torch.tensor([3, 0, 3])), dataset.latents(ALL)[[3, 0, 3]])
    with pytest.raises(IndexError):
        dataset.latents(torch.tensor([5]))

    rows, drop = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([False, False, False, True, False])
    conditioning, index_N = dataset.conditioning(rows, drop)
    embeds_PTD, mask_PT = conditioning["prompt_embeds"], conditioning["prompt_mask"]
    assert len(embeds_PTD) == 3 and index_N[0] == index_N[2] and index_N[1] == index_N[4]
    assert mask_PT.shape[1] == int(mask_PT.sum(1).max()) and not embeds_PTD[~mask_PT].any()
    for n, text in enumerate([CAPTIONS[0], CAPTIONS[1], CAPTIONS[2], EMPTY_CAPTION, CAPTIONS[1]]):
        expected_1TD, _ = encode_prompts(adapter, [text])
        torch.testing.assert_close(
            embeds_PTD[index_N[n]][mask_PT[index_N[n]]], expected_1TD[0], atol=1e-5, rtol=1e-5
        )


def test_a_finished_cache_is_reused_and_another_key_is_another_folder(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = encode(images, tiny_model, cache, mesh)
    (folder,) = folders(cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_encode_images", None)  # calling it would fail
        again = encode(images, tiny_model, cache, mesh)
    assert torch.equal(again.latents(ALL), first.latents(ALL))
    assert json.loads((folder / "index.json").read_text())["key"]["num_images"] == 5

    encode(images, tiny_model, cache, mesh, width=16)
    half = encode(images, tiny_model, cache, mesh, dtype=torch.bfloat16)
    assert half.conditioning(ALL, NONE)[0]["prompt_embeds"].dtype == torch.bfloat16
    assert half.latents(ALL).dtype == torch.float32
    os.utime(images / "0.png", ns=(0, 0))
    encode(images, tiny_model, cache, mesh)
    assert len(folders(cache)) == 4
    model = shutil.copytree(tiny_model, tmp_path / "model")
    os.utime(
        model / "transformer" / "diffusion_pytorch_model.safetensors", ns=(0, 0)
    )  # trained: of no account
    other = shutil.copytree(model, tmp_path / "other")
    os.utime(other / "vae" / "config.json", ns=(0, 0))
    assert (
        len(
            {
                cache_module._model_fingerprint(build_adapter(each))
                for each in (tiny_model, model, other)
            }
        )
        == 2
    )


@pytest.mark.parametrize("damage", ["cut", "missing", "no index", "bad index"])
def test_a_torn_cache_is_made_again(
    images: Path,
    tiny_model: Path,
    tmp_path: Path,
    mesh: Mesh,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / "cache"
    expected_BLC = encode(images, tiny_model, cache, mesh).latents(ALL)
    (folder,) = folders(cache)
    file = folder / ("index.json" if "index" in damage else "latents_00000_00000.safetensors")
    if damage in ("cut", "bad index"):
        file.write_bytes(file.read_bytes()[:-10])
    else:
        file.unlink()
    assert torch.equal(encode(images, tiny_model, cache, mesh).latents(ALL), expected_BLC)
    assert "torn" in caplog.text and folders(cache) == [folder]


def test_a_bad_image_leaves_nothing_behind(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh
) -> None:
    (images / "3.png").write_bytes((images / "3.png").read_bytes()[:300])
    with pytest.raises(
        AgreedError, match=r"metadata.jsonl:4 \(3.png\): 300 bytes that are no readable image"
    ):
        encode(images, tiny_model, tmp_path / "cache", mesh)
    assert folders(tmp_path / "cache") == []


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("num_bytes", "name"), [(20, "latents"), (6000, "tokens.prompt_embeds")])
def test_a_failing_write_leaves_nothing_behind(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh, num_bytes: int, name: str
) -> None:
    message = f"{name}_00000_00000.safetensors could not be written: .*MiB are free there"
    with largest_file(num_bytes), pytest.raises(AgreedError, match=message):
        encode(images, tiny_model, tmp_path / "cache", mesh)
    assert folders(tmp_path / "cache") == []
    assert len(encode(images, tiny_model, tmp_path / "cache", mesh)) == 5


def test_too_little_room_is_said_before_the_work(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cache_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1024)
    )
    with pytest.raises(AgreedError, match=r"has 0.0 MiB free, the latents need 0.0 MiB"):
        encode(images, tiny_model, tmp_path / "cache", mesh)
    assert folders(tmp_path / "cache") == []


def test_what_a_killed_run_left_is_removed_when_it_is_old(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh
) -> None:
    for name in ("old", "new"):
        (tmp_path / "cache" / f".writing_{name}").mkdir(parents=True)
    os.utime(tmp_path / "cache" / ".writing_old", ns=(0, 0))
    encode(images, tiny_model, tmp_path / "cache", mesh)
    assert [path.name for path in folders(tmp_path / "cache") if path.name.startswith(".")] == [
        ".writing_new"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_chars": 20},
            "metadata.jsonl:2 .*'caption' has 29 characters > data.max_prompt_chars=20",
        ),
        ({"width": 40}, "rollout.width=40 is not a positive multiple of 16"),
    ],
)
def test_refusals(
    images: Path,
    tiny_model: Path,
    tmp_path: Path,
    mesh: Mesh,
    options: dict[str, int],
    message: str,
) -> None:
    with pytest.raises(AgreedError, match=message):
        encode(images, tiny_model, tmp_path / "cache", mesh, **options)


def test_captions_that_come_with_the_images_are_checked_too(
    tiny_model: Path, tmp_path: Path, mesh: Mesh
) -> None:
    """This source does not know them before it draws the images."""
    source = Path("examples.shapes.images:ShapesImages:3")
    assert not open_images(str(source), seed=0).captions
    with pytest.raises(
        AgreedError, match=r"'caption' has \d+ characters > data.max_prompt_chars=5"
    ):
        encode(source, tiny_model, tmp_path / "cache", mesh, max_chars=5)
    assert folders(tmp_path / "cache") == []


def test_enlarged_images_are_counted(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        encode(images, tiny_model, tmp_path / "cache", mesh, height=32, width=96, batch=3)
    assert "5 of 5 images are enlarged more than 2× to 32×96" in caplog.text
    assert (
        "encoded 5 of 5 images on each of 1 ranks" in caplog.text
        and "encoded 5 of 5 captions" in caplog.text
    )


def _worker(images: str, model: str, cache: str, world_size: int) -> None:
    encode(Path(images), Path(model), Path(cache), init_alone(world_size))


@pytest.mark.slow
def test_ranks_share_the_work_and_get_the_same_rows(
    images: Path, tiny_model: Path, tmp_path: Path, mesh: Mesh
) -> None:
    run_ranks(_worker, 2, str(images), str(tiny_model), str(tmp_path / "two"), 2)
    (folder,) = folders(tmp_path / "two")
    for prefix in ("latents", "tokens.prompt_embeds", "lengths.prompt_mask"):
        assert len(list(folder.glob(f"{prefix}_*"))) == 2
    one, two = encode(images, tiny_model, tmp_path / "one", mesh), LatentDataset(folder)
    mapped = LatentDataset(folder, memory_bytes=0)
    assert (one.captions, len(two)) == (two.captions, 5)
    for rows in (ALL, torch.tensor([4, 4, 0, 2])):
        torch.testing.assert_close(two.latents(rows), one.latents(rows), atol=1e-5, rtol=0)
        drop = torch.zeros(len(rows), dtype=torch.bool)
        (expected, expected_N), (found, found_N) = (
            one.conditioning(rows, drop),
            two.conditioning(rows, drop),
        )
        assert torch.equal(found_N, expected_N) and torch.equal(
            found["prompt_mask"], expected["prompt_mask"]
        )
        torch.testing.assert_close(
            found["prompt_embeds"], expected["prompt_embeds"], atol=1e-5, rtol=1e-5
        )
        assert torch.equal(mapped.latents(rows), two.latents(rows))
        assert torch.equal(
            mapped.conditioning(rows, drop)[0]["prompt_embeds"], found["prompt_embeds"]
        )


def _failing_worker(images: str, model: str, cache: str, out: str) -> None:
    try:
        encode(Path(images), Path(model), Path(cache), init_alone(2))
    except AgreedError as error:
        Path(out, str(torch.distributed.get_rank())).write_text(str(error))


@pytest.mark.slow
def test_a_failure_of_one_rank_is_raised_on_all(
    images: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (images / "4.png").write_bytes(b"no image")
    run_ranks(
        _failing_worker, 2, str(images), str(tiny_model), str(tmp_path / "cache"), str(tmp_path)
    )
    for rank in "01":
        text = (tmp_path / rank).read_text()
        assert text.startswith("rank 1: ") and "(4.png)" in text
    assert folders(tmp_path / "cache") == []


def test_more_ranks_than_images(images: Path, tiny_model: Path, tmp_path: Path) -> None:
    (images / "metadata.jsonl").write_text('{"image": "0.png", "text": "a"}')
    run_ranks(_worker, 3, str(images), str(tiny_model), str(tmp_path / "cache"), 3)
    (folder,) = folders(tmp_path / "cache")
    dataset = LatentDataset(folder)
    assert (len(dataset), dataset.captions) == (1, [EMPTY_CAPTION, "a"])


def test_rows_over_many_files(tmp_path: Path) -> None:
    rows = torch.randn(50, 3)
    for rank, part in enumerate(rows.split(23)):
        writer = RowWriter(tmp_path, "x", rank, file_bytes=60)
        for few in part.split(2):
            writer.add(few)
        writer.flush()
    paths = sorted(tmp_path.iterdir())
    table = RowTable(paths)
    picked = torch.tensor([49, 0, 22, 23, 23, 7, 46])
    assert len(paths) > 6 and table.shape == (50, 3) and table.num_bytes == 600
    assert torch.equal(table.take(picked), rows[picked]) and torch.equal(table.whole(), rows)
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match=f"{wrong}.* of 50"):
            table.take(torch.tensor([3, wrong]))
    table.to_memory()
    assert torch.equal(table.take(picked), rows[picked])
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(ValueError, match="x_00000_00001.safetensors cannot be read: .*remove"):
        RowTable(paths)
