"""Encode instructions together with their pictures: one function for trainer and replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor

from megadiff.models.packing import pad_rows
from megadiff.models.qwen_image_edit.marks import check_text
from megadiff.models.qwen_image_edit.sides import picture_sides

# As in the pipelines of diffusers 0.40 and vllm-omni 0.28.
TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n"
    "{}<|im_end|>\n<|im_start|>assistant\n"
)
PREFIX_TOKENS = 64  # of the template before the pictures; the transformer does not read them
PICTURE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"


class PictureProcessor(Qwen2VLProcessor):
    """Turn text and pictures into the text encoder's inputs.

    Without the stock class's video processor, which needs torchvision. Always by Pillow, as
    torchvision resizes differently: trainer and replica must agree where only one of them has it.
    """

    # transformers reads from these arguments what a processor consists of
    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)

    @classmethod
    def from_pretrained(cls, model_folder: Path | str, **_: object) -> PictureProcessor:
        """Read a pipeline folder's image processor and tokenizer."""
        # from its module: the package's own door to this class asks for torchvision
        from transformers import Qwen2Tokenizer
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        image_processor = AutoImageProcessor.from_pretrained(
            Path(model_folder) / "processor", backend="pil", local_files_only=True
        )
        tokenizer = Qwen2Tokenizer.from_pretrained(Path(model_folder) / "tokenizer")
        return cls(image_processor, tokenizer)

    def inputs(self, text: str, pictures: Sequence[Tensor]) -> Any:
        """Return the encoder's arguments for one text and its pictures, uint8 [H, W, 3] each.

        Raises ValueError as check_text does.
        """
        check_text(text)
        marks = "".join(PICTURE.format(index + 1) for index in range(len(pictures)))
        return self(
            text=[TEMPLATE.format(marks + text)],
            images=[_scaled(picture.cpu().numpy()) for picture in pictures] or None,
            return_tensors="pt",
        )


@torch.no_grad()
def encode(
    texts: Sequence[str],
    pictures: Sequence[Sequence[Tensor]],
    processor: PictureProcessor,
    text_encoder: Any,
) -> tuple[Tensor, Tensor]:
    """Return (embeddings [B, tokens, D], mask [B, tokens] bool), as wide as the longest row.

    pictures: of each text, uint8 [H, W, 3], in the order in which the text numbers them.
    """
    rows = []
    # one at a time: an embedding must not depend on the others' lengths
    for text, pictures_of_text in zip(texts, pictures, strict=True):
        inputs = processor.inputs(text, pictures_of_text).to(text_encoder.device)
        # With mm_token_type_ids: without it transformers 5 numbers a picture's tokens as if they
        # were text, silently (huggingface/diffusers issue 14194). The model was trained with rows
        # and columns.
        states = text_encoder(**inputs, output_hidden_states=True).hidden_states[-1]
        rows.append(states[0, PREFIX_TOKENS:])
    return pad_rows(rows)


def _scaled(picture_HWC: np.ndarray) -> Image.Image:
    height, width = picture_sides(*picture_HWC.shape[:2])
    image = Image.fromarray(picture_HWC)
    return image.resize((width, height), Image.Resampling.LANCZOS)
