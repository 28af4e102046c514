"""transformers' detectors and CLIP, tiny and random, against their plain outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPModel,
    CLIPTokenizer,
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    ResNetConfig,
    SwinConfig,
)
from transformers.models.mask2former import modeling_mask2former
from transformers.models.mask2former.image_processing_pil_mask2former import (
    Mask2FormerImageProcessorPil,
)

from megadiff.data.prompts import prompt_id
from megadiff.rewards.base import RewardContext, RewardSample
from megadiff.rewards.clip_colors import COLORS, ClipColors
from megadiff.rewards.detectors import (
    DetectedObject,
    folder_labels,
    geneval_name,
    load_detector,
)
from megadiff.rewards.geneval import GenevalReward
from megadiff.types import Prompt
from tests import tiny_clip

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
LABELS = {0: "person", 1: "horse", 2: "mouse"}
IMAGE = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)


def write_processor(folder: Path, kind: str, **settings: object) -> None:
    text = json.dumps({"image_processor_type": f"{kind}ImageProcessor", **settings})
    (folder / "preprocessor_config.json").write_text(text)


@pytest.fixture(scope="module")
def detr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detr")
    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=6,
        id2label=LABELS,
    )
    torch.manual_seed(0)
    DetrForObjectDetection(config).save_pretrained(folder)
    write_processor(folder, "Detr", size={"shortest_edge": 48, "longest_edge": 80})
    return folder


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mask2former")
    backbone = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone=None,
        backbone_config=backbone,
        hidden_dim=32,
        feature_size=32,
        mask_feature_size=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        num_attention_heads=2,
        num_queries=6,
        id2label=LABELS,
    )
    torch.manual_seed(0)
    # Its loss asks for scipy, which is not there.
    with patch.object(modeling_mask2former, "requires_backends", lambda *_: None):
        Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    write_processor(folder, "Mask2Former", size={"height": 64, "width": 64})
    return folder


def test_a_detection_folder_gives_its_plain_outputs(detr: Path) -> None:
    assert folder_labels(detr) == {"person", "horse", "computer mouse"}
    answers = load_detector(detr, CPU).detect([IMAGE, IMAGE[:, ::-1].copy()], threshold=0.05)
    assert [len(objects) for objects in answers] == [6, 6]

    # The image has the processor's size already, so only its normalisation is left.
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    pixels = (torch.from_numpy(IMAGE).permute(2, 0, 1) / 255 - mean) / std
    with torch.no_grad():
        outputs = DetrForObjectDetection.from_pretrained(detr).eval()(pixels[None])
    probabilities = outputs.logits[0].softmax(-1)[:, :3]
    for query, detected in enumerate(answers[0]):
        score, label = probabilities[query].max(0)
        x, y, width, height = outputs.pred_boxes[0, query].tolist()
        box = ((x - width / 2) * 80, (y - height / 2) * 48)
        box += ((x + width / 2) * 80, (y + height / 2) * 48)
        assert detected.score == pytest.approx(float(score), abs=1e-5)
        assert detected.label == ["person", "horse", "computer mouse"][int(label)]
        assert detected.box == pytest.approx(box, abs=1e-3)
    nothing = load_detector(detr, CPU).detect([IMAGE], threshold=0.99)
    assert nothing == [[]]


def test_a_folder_that_lacks_tensors_is_refused(detr: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(detr, tmp_path / "torn")
    weights = load_file(folder / "model.safetensors")
    del weights["class_labels_classifier.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of .*class_labels_classifier.bias"):
        load_detector(folder, CPU)


def test_a_segmentation_folder_gives_masks_and_their_boxes(mask2former: Path) -> None:
    detector = load_detector(mask2former, CPU)
    objects = detector.detect([IMAGE[::-1].copy(), IMAGE], threshold=0.05)[1]

    # transformers' own way resizes masks twice, which moves their edges and scores a little.
    processor = Mask2FormerImageProcessorPil.from_pretrained(mask2former)
    with patch.object(modeling_mask2former, "requires_backends", lambda *_: None):
        model = Mask2FormerForUniversalSegmentation.from_pretrained(mask2former).eval()
    with torch.no_grad():
        outputs = model(**processor([Image.fromarray(IMAGE)], return_tensors="pt"))
    expected = processor.post_process_instance_segmentation(
        outputs, threshold=0.05, target_sizes=[(48, 80)], return_binary_maps=True
    )[0]
    # It keeps as many of (query, class) as there are queries.
    surest = sorted(objects, key=lambda detected: -detected.score)[:6]
    scores = sorted((segment["score"] for segment in expected["segments_info"]), reverse=True)
    assert [detected.score for detected in surest] == pytest.approx(scores, abs=0.01)
    names = {number: geneval_name(label) for number, label in LABELS.items()}
    for segment, mask in zip(expected["segments_info"], expected["segmentation"], strict=True):
        (twin,) = (
            detected
            for detected in objects
            if abs(detected.score - segment["score"]) < 0.002
            and detected.label == names[segment["label_id"]]
            and (detected.mask_HW == mask.bool().numpy()).mean() > 0.9
        )
        assert twin.score > 0.05

    for detected in objects:
        assert detected.mask_HW is not None and detected.mask_HW.shape == (48, 80)
        left, top, right, bottom = (int(side) for side in detected.box)
        inside = detected.mask_HW[top:bottom, left:right]
        # Tight: all pixels are within, and each side has one.
        assert inside.sum() == detected.mask_HW.sum()
        assert inside[0].any() and inside[-1].any()
        assert inside[:, 0].any() and inside[:, -1].any()
    assert detector.detect([IMAGE], threshold=0.99) == [[]]


def test_a_folder_of_another_model_is_refused(tmp_path: Path, clip: Path) -> None:
    with pytest.raises(ValueError, match="no architecture.*DETR"):
        GenevalReward(path=str(clip))
    with pytest.raises(ValueError, match="neither config.json"):
        GenevalReward(path=str(tmp_path))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "tiny"
    return tiny_clip.write_transformers(folder, tiny_clip.random_state())


def expected_color(folder: Path, crop: np.ndarray, label: str) -> str:
    """Score the ten colours one text at a time, by the whole model's own logits."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    width, height = crop.shape[1], crop.shape[0]
    scale = 32 / min(width, height)
    resized = Image.fromarray(crop).resize(
        (int(width * scale), int(height * scale)), Image.Resampling.BICUBIC
    )
    left, top = (resized.width - 32) // 2, (resized.height - 32) // 2
    square = np.asarray(resized.crop((left, top, left + 32, top + 32)), np.float32) / 255
    pixels = torch.from_numpy(
        (square - np.float32(tiny_clip.MEAN)) / np.float32(tiny_clip.STD)
    ).permute(2, 0, 1)

    scores = []
    with torch.no_grad():
        for color in COLORS:
            total = torch.zeros(tiny_clip.EMBEDDING)
            for text in (
                f"a photo of a {color} {label}",
                f"a photo of a {color}-colored {label}",
                f"a photo of a {color} object",
            ):
                outputs = model(**tokenizer(text, return_tensors="pt"), pixel_values=pixels[None])
                total += outputs.text_embeds[0]
            scores.append(float(outputs.image_embeds[0] @ total / total.norm()))
    # By more than rounding, or the test would say nothing.
    best, second = sorted(scores)[:-3:-1]
    assert best - second > 1e-4
    return COLORS[int(np.argmax(scores))]


def test_colours_are_those_of_an_independent_computation(clip: Path) -> None:
    colors = ClipColors(clip, CPU)
    random = np.random.default_rng(3)
    image = random.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    mask = np.zeros((90, 120), bool)
    mask[10:30, 20:40] = True
    boxes = [(0.0, 0.0, 64.0, 32.0), (40.0, 10.0, 72.0, 90.0), (18.0, 8.0, 50.0, 40.0)]
    objects = [
        DetectedObject(label="cup", score=0.9, box=box, mask_HW=mask if box == boxes[2] else None)
        for box in boxes
    ]
    crops = [image[0:32, 0:64], image[10:90, 40:72]]
    masked = np.full((32, 32, 3), 0x99, np.uint8)
    masked[2:22, 2:22] = image[10:30, 20:40]
    crops.append(masked)
    expected = [expected_color(clip, crop, "cup") for crop in crops]
    assert colors.names(image, objects, "cup") == expected


def test_rows_of_colours_on_a_photograph(clip: Path) -> None:
    reward = GenevalReward(path=str(ROOT / "assets/detector"), clip=str(clip), reward="partial")
    image = np.asarray(Image.open(ROOT / "tests/data/photos/horse.webp").convert("RGB"))
    reward.open(RewardContext(device=CPU))
    assert reward._detector is not None
    detected = reward._detector.detect([image], threshold=0.3)[0][0]
    left, top, right, bottom = (round(side) for side in detected.box)
    color = expected_color(clip, image[top:bottom, left:right], "horse")
    other = next(name for name in COLORS if name != color)

    def scores(tag: str, *clauses: dict[str, object]) -> list[float]:
        fields = {"tag": tag, "include": list(clauses)}
        prompt = Prompt(text="a horse", id=prompt_id("a horse", " "), fields=fields)
        reward.validate([prompt])
        sample = RewardSample(pixels=image[None], prompt=prompt, sample_index=0)
        return reward.score([sample])

    horse = {"class": "horse", "count": 1}
    cup = {"class": "cup", "count": 1, "color": color}
    assert scores("colors", {**horse, "color": color}) == [1.0]
    assert scores("colors", {**horse, "color": other}) == [0.5]
    assert scores("color_attr", {**horse, "color": color}, cup) == [0.5]
    assert scores("color_attr", {**horse, "color": other}, cup) == [0.25]
    assert reward.figures() == {"strict": 0.25, "partial": 0.5625}
    reward.close()
