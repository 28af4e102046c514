"""The clip reward against the formulas in plain torch and numpy, on tiny random folders."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from megadiff.config.rewards import RewardConfig
from megadiff.data.prompts import prompt_id
from megadiff.rewards.base import RewardContext, RewardSample, build_rewards
from megadiff.rewards.clip import SCORES, ClipReward
from megadiff.types import Prompt
from tests import tiny_clip

CPU = RewardContext(device=torch.device("cpu"))
STATE = tiny_clip.random_state()
VOCAB, _ = tiny_clip.vocabulary()
# A long prompt has 4 words and 80 tokens of one letter each, before start and end.
LONG = "red cat blue dog " + "x " * 80


def tokens(*words: str) -> list[int]:
    names = ["<|startoftext|>", *(f"{word}</w>" for word in words), "<|endoftext|>"]
    return [VOCAB[name] for name in names]


def normalised(pixels_NHW3: np.ndarray) -> torch.Tensor:
    values = (pixels_NHW3 / 255 - tiny_clip.MEAN) / tiny_clip.STD
    return torch.from_numpy(values).permute(0, 3, 1, 2).float()


def cropped(pixels: np.ndarray) -> np.ndarray:
    """Scale [54, 96, 3] to 32 rows and 56 columns, and take the 32 in the middle."""
    scaled = np.asarray(Image.fromarray(pixels).resize((56, 32), Image.Resampling.BICUBIC))
    return scaled[:, 12:44]


def padded(pixels: np.ndarray) -> np.ndarray:
    """Scale [54, 96, 3] to 18 rows and 32 columns, with 7 black rows above and below."""
    scaled = np.asarray(Image.fromarray(pixels).resize((32, 18), Image.Resampling.BICUBIC))
    return np.pad(scaled, ((7, 7), (0, 0), (0, 0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_clip.write_transformers(tmp_path_factory.mktemp("clip") / "tiny", STATE)
    tiny_clip.write_head(path / tiny_clip.HEAD_FILE)
    return path


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return tiny_clip.pictures()


def samples_of(pictures: np.ndarray, *texts: str) -> list[RewardSample]:
    samples = []
    for index, pixels in enumerate(pictures):
        text = texts[index % len(texts)]
        prompt = Prompt(text=text, id=prompt_id(text, " "))
        samples.append(RewardSample(pixels=pixels[None], prompt=prompt, sample_index=index))
    return samples


def opened(path: Path, score: str, **args: object) -> ClipReward:
    reward = ClipReward(path=str(path), score=score, **args)
    reward.validate([Prompt(text="red cat", id="0")])
    reward.open(CPU)
    return reward


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pickscore": lambda cosine: np.exp(tiny_clip.LOGIT_SCALE) * cosine / 26,
    "clipscore": lambda cosine: cosine,
    "hpsv2": lambda cosine: cosine,
}


@pytest.mark.parametrize("score", FORMULAS)
def test_formula_crop_and_padding(folder: Path, pictures: np.ndarray, score: str) -> None:
    prepare = padded if score == "hpsv2" else cropped
    pixels_N3HW = normalised(np.stack([prepare(picture) for picture in pictures]))
    image_ND = tiny_clip.embed_image(STATE, pixels_N3HW)
    red_cat = tiny_clip.embed_text(STATE, tokens("red", "cat"))
    dog = tiny_clip.embed_text(STATE, tokens("blue", "cat", "dog"))
    cosine_N = (image_ND * torch.stack([red_cat, dog, red_cat, dog])).sum(1)
    expected = FORMULAS[score](cosine_N)
    assert expected.std() > 0.004  # else any answer would do

    got = opened(folder, score).score(samples_of(pictures, "red cat", "Blue  cat dog"))
    torch.testing.assert_close(torch.tensor(got), expected, atol=2e-6, rtol=2e-6)


def test_the_page_s_example_scores(folder: Path, pictures: np.ndarray, tmp_path: Path) -> None:
    """docs/rewards.md, with the tiny folder in place of /models."""
    page = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
    (example,) = re.findall(r"```yaml\n# clip.yaml\n(.*?)```", page, re.DOTALL)
    section = OmegaConf.create(example.replace("/models", str(tmp_path))).reward
    for args in {values.args.path: values.args for values in section.values()}.values():
        shutil.copytree(folder, args.path)
        if "weights" in args:
            torch.save(STATE, Path(args.path) / args.weights)

    configs = {name: RewardConfig(**values) for name, values in section.items()}
    samples = samples_of(pictures, "red cat")
    for reward in build_rewards(configs).values():
        reward.validate([samples[0].prompt])
        reward.open(CPU)
        assert np.std(reward.score(samples)) > 0
    assert {values.args.score for values in section.values()} == set(SCORES)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_linear_layers_without_activations(
    folder: Path, pictures: np.ndarray, tmp_path: Path, suffix: str
) -> None:
    beside = shutil.copytree(folder, tmp_path / "clip")
    head = tiny_clip.write_head(tmp_path / f"mine{suffix}", seed=2)
    pixels_N3HW = normalised(np.stack([cropped(picture) for picture in pictures]))
    hidden = tiny_clip.embed_image(STATE, pixels_N3HW).double().numpy()
    for index in tiny_clip.HEAD_SIZES:
        weight = head[f"layers.{index}.weight"].double().numpy()
        hidden = hidden @ weight.T + head[f"layers.{index}.bias"].double().numpy()

    reward = opened(beside, "aesthetic", head=f"mine{suffix}")
    got = reward.score(samples_of(pictures, "any", LONG))
    np.testing.assert_allclose(got, hidden[:, 0], atol=1e-5)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_open_clip_checkpoint_scores_as_the_same_weights_of_transformers(
    folder: Path, pictures: np.ndarray, tmp_path: Path, quick_gelu: bool
) -> None:
    path = tiny_clip.write_open_clip(tmp_path / "open", STATE, quick_gelu=quick_gelu)
    samples = samples_of(pictures, "red cat")
    got = opened(path, "clipscore").score(samples)

    pixels_N3HW = normalised(np.stack([cropped(picture) for picture in pictures]))
    image_ND = tiny_clip.embed_image(STATE, pixels_N3HW, quick=quick_gelu)
    text_D = tiny_clip.embed_text(STATE, tokens("red", "cat"), quick=quick_gelu)
    np.testing.assert_allclose(got, image_ND @ text_D, atol=1e-6)
    if not quick_gelu:
        np.testing.assert_allclose(
            got, opened(folder, "clipscore").score(samples), atol=1e-6, rtol=0
        )


def test_hpsv2_file_beside_the_base_model(
    folder: Path, pictures: np.ndarray, tmp_path: Path
) -> None:
    """As it is downloaded: its file of open_clip's names in the folder of transformers' files."""
    path = shutil.copytree(folder, tmp_path / "hps")
    tuned = tiny_clip.random_state(seed=5)
    saved = {"epoch": 3, "state_dict": {f"module.{name}": part for name, part in tuned.items()}}
    torch.save(saved, path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ValueError, match=r"say which weights .* HPS_v2.1_compressed.pt\}"):
        opened(path, "hpsv2")

    got = opened(path, "hpsv2", weights="HPS_v2.1_compressed.pt").score(samples_of(pictures, "dog"))
    pixels_N3HW = normalised(np.stack([padded(picture) for picture in pictures]))
    text_D = tiny_clip.embed_text(tuned, tokens("dog"))
    np.testing.assert_allclose(got, tiny_clip.embed_image(tuned, pixels_N3HW) @ text_D, atol=1e-6)


def test_alone_as_in_a_batch_and_after_sleep(folder: Path, pictures: np.ndarray) -> None:
    random_numbers = torch.get_rng_state()
    reward = opened(folder, "pickscore")
    samples = samples_of(pictures, "red cat", "dog")
    together = reward.score(samples)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    alone = [reward.score([sample])[0] for sample in samples]
    np.testing.assert_allclose(alone, together, atol=1e-6)
    reward.sleep()
    reward.wake()
    assert reward.score(samples) == together


def test_bfloat16_is_near_float32(folder: Path, pictures: np.ndarray) -> None:
    samples = samples_of(pictures, "red cat")
    exact = opened(folder, "pickscore").score(samples)
    coarse = opened(folder, "pickscore", dtype="bfloat16").score(samples)
    assert 0 < np.abs(np.subtract(exact, coarse)).max() < 0.2 * np.std(exact) + 0.02


def test_sizes_that_scale_to_less_than_a_pixel_are_scored(folder: Path) -> None:
    for score in ("hpsv2", "clipscore"):
        reward = opened(folder, score)
        for shape in ((1, 1), (1, 200), (300, 2), (32, 32), (54, 32)):
            picture = np.full((1, *shape, 3), 200, np.uint8)
            assert np.isfinite(reward.score(samples_of(picture, "dog"))).all()


def test_a_long_prompt_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "clip")
    (path / "model.safetensors").write_bytes(b"nothing")
    prompts = [Prompt(text=text, id=text[:3]) for text in ("red cat", LONG, "dog", LONG)]
    reward = ClipReward(path=str(path), score="pickscore")
    reward.validate(prompts[:1])
    with pytest.raises(ValueError) as caught:
        reward.validate(prompts)
    for words in ("'red cat blue dog x", "86 tokens", "reads 77", "2 of 4", "{truncate: true}"):
        assert words in str(caught.value)
    ClipReward(path=str(path), score="aesthetic").validate(prompts)


def test_truncate_scores_the_beginning(folder: Path, pictures: np.ndarray) -> None:
    reward = opened(folder, "clipscore", truncate=True)
    reward.validate([Prompt(text=LONG, id="0")])
    # 75 tokens fit between start and end
    beginning = "red cat blue dog " + "x " * 71
    samples = samples_of(pictures[:1], LONG) + samples_of(pictures[:1], beginning)
    one, other = reward.score(samples)
    assert one == other


def test_a_video_is_refused(folder: Path) -> None:
    video = np.zeros((1, 9, 32, 32, 3), np.uint8)
    prompt = Prompt(text="dog", id="0")
    sample = RewardSample(pixels=video[0], prompt=prompt, sample_index=0)
    with pytest.raises(ValueError, match="9 frames; use type: frame"):
        opened(folder, "clipscore").score([sample])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"score": "pick_score"}, ["score='pick_score'", "did you mean 'pickscore'", "hpsv2"]),
        ({"dtype": "fp32"}, ["dtype='fp32'", "float32"]),
        ({"path": "/no/such/folder"}, ["/no/such/folder is not a folder"]),
        ({"weights": "gone.bin"}, ["weights=gone.bin", "does not exist"]),
        ({"score": "aesthetic", "head": "gone.pth"}, ["head=gone.pth", "neither in"]),
    ],
)
def test_wrong_arguments(folder: Path, args: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ClipReward(**({"path": str(folder), "score": "clipscore"} | args)).validate([])
    for word in words:
        assert word in str(caught.value)


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        values = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(values | changes))

    return change


def removed(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return remove


def wrong_head(path: Path) -> None:
    state = torch.load(path / tiny_clip.HEAD_FILE, weights_only=True)
    state["layers.7.weight"] = torch.zeros(2, 16)
    torch.save(state, path / tiny_clip.HEAD_FILE)


@pytest.mark.parametrize(
    ("damage", "score", "words"),
    [
        (removed("config.json"), "clipscore", ["not a CLIP folder", "open_clip_config.json"]),
        (edit("config.json", model_type="bert"), "clipscore", ["'bert'", "must be 'clip'"]),
        (removed("model.safetensors"), "clipscore", ["no weights", "pytorch_model.bin"]),
        (removed("tokenizer.json"), "clipscore", ["merges.txt", "copy tokenizer.json"]),
        (removed(tiny_clip.HEAD_FILE), "aesthetic", ["neither in", tiny_clip.HEAD_FILE]),
        (wrong_head, "aesthetic", ["768-1024-128-64-16-1", "[2, 16]"]),
        (edit("config.json", projection_dim=512), "aesthetic", ["have 768", "have 512"]),
        (
            edit("preprocessor_config.json", crop_size={"height": 64, "width": 64}),
            "clipscore",
            ["64", "image_size=32"],
        ),
    ],
)
def test_a_wrong_folder_fails_before_the_first_step(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], score: str, words: list[str]
) -> None:
    path = shutil.copytree(folder, tmp_path / "clip")
    damage(path)
    with pytest.raises(ValueError) as caught:
        ClipReward(path=str(path), score=score).validate([Prompt(text="dog", id="0")])
    for word in words:
        assert word in str(caught.value)


def cut(path: Path) -> None:
    os.truncate(path / "weights.bin", (path / "weights.bin").stat().st_size // 2)


def replace(path: Path, **changes: object) -> None:
    state = tiny_clip.random_state() | changes
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    torch.save(kept, path / "weights.bin")


class Harmful:
    def __reduce__(self) -> tuple:
        return (os.mkdir, ("harm",))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["weights.bin", "bytes) is not a whole file"]),
        (lambda path: replace(path, logit_scale=None), ["1 tensors are missing", "logit_scale"]),
        (
            lambda path: replace(path, text_projection=torch.zeros(32, 64)),
            ["1 tensors are mismatched", "text_projection"],
        ),
        (lambda path: replace(path, extra=torch.zeros(1)), ["tensor extra is not of open_clip"]),
        (
            lambda path: torch.save({"logit_scale": torch.zeros(()), "x": Harmful()}, path),
            ["is not a whole file of tensors"],
        ),
    ],
    ids=["cut", "missing", "shape", "unknown", "pickle"],
)
def test_a_wrong_checkpoint_is_refused_when_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable, words: list
) -> None:
    monkeypatch.chdir(tmp_path)
    path = shutil.copytree(folder, tmp_path / "clip")
    torch.save(STATE, path / "weights.bin")
    damage(path / "weights.bin" if words[0].startswith("is not a whole") else path)
    with pytest.raises(ValueError) as caught:
        opened(path, "clipscore", weights="weights.bin")
    for word in words:
        assert word in str(caught.value)
    assert not Path("harm").exists()


def test_a_cut_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "clip")
    os.truncate(path / "model.safetensors", 1000)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        opened(path, "clipscore")


@pytest.mark.parametrize(
    ("key", "changes"),
    [("vision_cfg", {"timm_model_name": "vit"}), ("vision_cfg", {"layers": [3, 4, 6, 3]})],
)
def test_other_open_clip_models_are_refused(tmp_path: Path, key: str, changes: dict) -> None:
    path = tiny_clip.write_open_clip(tmp_path / "open", STATE)
    config = json.loads((path / "open_clip_config.json").read_text())
    config["model_cfg"][key] |= changes
    (path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{key}.{next(iter(changes))}.*remote reward"):
        ClipReward(path=str(path), score="clipscore").validate([])
