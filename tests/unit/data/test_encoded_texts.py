"""Captions in the cache come back under every name that a family's prompt encoder gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megadiff.data.encoded_texts import EncodedTexts, EncodedTextWriter
from megadiff.data.images import open_images
from megadiff.data.latents import EMPTY_CAPTION, encode_dataset
from megadiff.models.registry import build_adapter
from tests.meshes import one_rank_mesh

WIDTHS = (3, 5)  # of two calls
LENGTHS = ([2, 3], [5, 1, 4])


def encoded(width: int, lengths: list[int]) -> dict[str, Tensor]:
    """Return two texts with masks of their own, ids among them, and a vector without one."""
    generator = torch.Generator().manual_seed(width)
    length_B = torch.tensor(lengths)
    size = (len(lengths), width)
    return {
        "prompt_embeds": torch.randn(*size, 4, generator=generator),
        "prompt_ids": torch.randint(0, 99, size, generator=generator),
        "prompt_mask": torch.arange(width) < length_B[:, None],
        "glyph_embeds": torch.randn(*size, 2, generator=generator).bfloat16(),
        "glyph_mask": torch.arange(width) < (length_B[:, None] - 1),
        "pooled_prompt_embeds": torch.randn(len(lengths), 6, generator=generator),
    }


def write(folder: Path, calls: list[dict[str, Tensor]], *, rank: int = 0) -> None:
    writer = EncodedTextWriter(folder, rank)
    for call in calls:
        writer.add(call)
    writer.flush()


def test_every_name_comes_back_without_the_padding_of_its_call(tmp_path: Path) -> None:
    calls = [encoded(*call) for call in zip(WIDTHS, LENGTHS, strict=True)]
    for rank, call in enumerate(calls):
        write(tmp_path, [call], rank=rank)
    texts = EncodedTexts(tmp_path)
    rows = [(call, row) for call in calls for row in range(len(call["prompt_mask"]))]

    captions_P = torch.tensor([1, 4, 0, 1])
    for _ in range(2):
        taken = texts.take(captions_P)
        assert taken.keys() == calls[0].keys()
        assert taken["prompt_mask"].shape == (4, 4)
        assert taken["glyph_embeds"].shape == (4, 3, 2)
        assert taken["glyph_embeds"].dtype == torch.bfloat16
        for place, caption in enumerate(captions_P.tolist()):
            call, row = rows[caption]
            for name, value in taken.items():
                mask_T = call.get(f"{name.rpartition('_')[0]}_mask")
                expected = call[name][row]
                found = value[place]
                if mask_T is not None:
                    length = int(mask_T[row].sum())
                    assert not found[length:].any()
                    expected = expected[:length]
                    found = found[:length]
                assert torch.equal(found, expected), name
        texts.to_memory()


def test_rows_of_two_shapes_without_a_mask_are_refused(tmp_path: Path) -> None:
    calls = []
    for width in WIDTHS:
        calls.append({"prompt_embeds": torch.zeros(2, width, 4)})
    with pytest.raises(
        ValueError,
        match=r"prompt_embeds in rows of \[3, 4\] and of \[5, 4\]; give it a prompt_mask",
    ):
        write(tmp_path, calls)


def test_a_cache_without_lengths_is_named(tmp_path: Path) -> None:
    write(tmp_path, [encoded(3, [2, 3])])
    (tmp_path / "tokens.prompt_ids_00000_00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="tokens.prompt_ids_.*cannot be read: .*made again"):
        EncodedTexts(tmp_path)


def test_the_pooled_vector_of_sd3_is_what_its_encoder_gives(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Three encoders, no mask: a caption has all its 333 tokens, padding as well."""
    adapter = build_adapter(tiny_folder("sd35_medium"))
    source = open_images("examples.shapes.images:ShapesImages:3:1", seed=0)
    cpu = torch.device("cpu")
    dataset = encode_dataset(
        source,
        adapter,
        folder=tmp_path,
        height=32,
        width=32,
        max_chars=200,
        dtype=torch.float32,
        device=cpu,
        mesh=one_rank_mesh(),
        batch=2,
    )
    rows = torch.tensor([0, 2, 1])
    conditioning, index_N = dataset.conditioning(rows, torch.tensor([False, False, True]))
    assert conditioning.keys() == {"prompt_embeds", "pooled_prompt_embeds"}
    assert conditioning["prompt_embeds"].shape[1] == 333
    texts = [dataset.captions[int(dataset.caption_index[row])] for row in rows[:2]]
    texts.append(EMPTY_CAPTION)
    with adapter.prompt_encoder(dtype=torch.float32, device=cpu) as encode:
        expected = encode(texts)
    for name, value in expected.items():
        torch.testing.assert_close(conditioning[name][index_N], value, atol=1e-5, rtol=1e-5)
