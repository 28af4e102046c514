"""Reward clip: PickScore, CLIPScore, HPSv2 and the aesthetic predictor, from local folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from megadiff.process.doors import near
from megadiff.rewards.base import Reward, RewardContext, RewardSample
from megadiff.rewards.clip_folder import (
    find_weights,
    image_side,
    load_aesthetic_head,
    load_config,
    load_image_processor,
    load_model,
    load_tokenizer,
    token_limit,
)
from megadiff.types import DTYPES, Prompt

SCORES = ("pickscore", "clipscore", "hpsv2", "aesthetic")


class ClipReward(Reward):
    """Score how well a picture fits its prompt, or how it looks, as a CLIP finetuned on it says.

    score, with cos between the embeddings of picture and prompt:
      pickscore: exp(logit_scale) · cos / 26. arXiv 2305.01569.
      clipscore: cos. arXiv 2104.08718.
      hpsv2: cos, of the whole picture padded to a square, where the others crop its middle.
        arXiv 2306.09341.
      aesthetic: linear layers on the picture's normalised embedding; the prompt does not count.
    path: the CLIP's folder, of transformers or open_clip. weights: its file of weights, where it
    has several. head: the aesthetic layers' file, in that folder or beside it.
    dtype: of the CLIP. A group's scores lie so close together that bfloat16 moves them by 6 % of
    their spread.
    truncate: cut prompts that are longer than the CLIP reads (77 tokens) instead of refusing them.
    """

    samples_per_call = 16  # about a minute of ViT-H/14 on one core
    workers = 1  # torch has threads of its own, and the model must not run twice at a time

    def __init__(
        self,
        *,
        path: str,
        score: str,
        weights: str | None = None,
        head: str = "sac+logos+ava1-l14-linearMSE.pth",
        dtype: str = "float32",
        truncate: bool = False,
    ) -> None:
        if score not in SCORES:
            raise ValueError(
                f"score={score!r} is unknown{near(str(score), SCORES)}; known: {', '.join(SCORES)}"
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is unknown; known: {', '.join(DTYPES)}")

        self.folder = Path(path)
        self.kind = score
        self.weights = weights
        self.head = head
        self.dtype = DTYPES[dtype]
        self.truncate = truncate

    def validate(self, prompts: Sequence[Prompt]) -> None:
        """Check the folder's files without loading weights, and the length of the prompts."""
        config = load_config(self.folder)
        find_weights(self.folder, self.weights)
        load_image_processor(self.folder)
        if self.kind == "aesthetic":
            self._load_head(config.projection_dim)
            return

        tokenizer = load_tokenizer(self.folder)
        if self.truncate or not prompts:
            return
        # verbose: transformers' own warning about the length says neither prompt nor fix
        tokens = tokenizer([prompt.text for prompt in prompts], verbose=False)["input_ids"]
        limit = token_limit(config)
        long = [index for index, ids in enumerate(tokens) if len(ids) > limit]
        if long:
            first = long[0]
            raise ValueError(
                f"the prompt {prompts[first].text[:200]!r} has {len(tokens[first])} tokens, and "
                f"{self.folder} reads {limit}, start and end included; {len(long)} of "
                f"{len(prompts)} prompts are too long: shorten them, or score their beginning "
                "with args: {truncate: true}"
            )

    def open(self, context: RewardContext) -> None:
        self._device = context.device
        self._processor = load_image_processor(self.folder)
        self._model = load_model(self.folder, self.weights)
        # Taken before the cast: bfloat16 would round it.
        logit_scale = self._model.logit_scale.exp().item()
        self._scale = logit_scale / 26 if self.kind == "pickscore" else 1.0
        self._networks = torch.nn.ModuleList([self._model]).to(self.dtype)

        if self.kind == "aesthetic":
            # After the cast: the head stays in float32.
            self._head = self._load_head(self._model.config.projection_dim)
            self._networks.append(self._head)
        else:
            self._tokenizer = load_tokenizer(self.folder)
        if self.kind == "hpsv2":
            # pad_to_square does that.
            self._processor.do_resize = False
            self._processor.do_center_crop = False

        self.wake()

    def sleep(self) -> None:
        self._networks.to("cpu")
        if self._device.type == "cuda":
            # Else the memory stays with this process, which does not use it.
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._networks.to(self._device)

    @torch.inference_mode()
    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        image_ND = self._embed_images([_image(sample) for sample in samples])
        if self.kind == "aesthetic":
            return self._head(image_ND)[:, 0].tolist()

        # A group's samples share their prompt, so mostly there is one text.
        texts = {sample.prompt.text for sample in samples}
        embeddings = {text: self._embed_text(text) for text in texts}
        text_ND = torch.stack([embeddings[sample.prompt.text] for sample in samples])
        return (self._scale * (image_ND * text_ND).sum(dim=1)).tolist()

    def _embed_images(self, images: list[np.ndarray]) -> torch.Tensor:
        """Return normalised embeddings [N, D], float32. images: [H, W, 3] uint8 RGB."""
        if self.kind == "hpsv2":
            side = image_side(self._model.config)
            images = [pad_to_square(image, side) for image in images]
        pixels = self._processor(images, input_data_format="channels_last", return_tensors="pt")
        pixel_values = pixels["pixel_values"].to(self._device, self.dtype)
        features = self._model.get_image_features(pixel_values=pixel_values)
        return _normalised(features.pooler_output)

    def _embed_text(self, text: str) -> torch.Tensor:
        """Return the normalised embedding [D], float32."""
        # One at a time needs no padding, so the embedding does not depend on other prompts.
        limit = token_limit(self._model.config)
        tokens = self._tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
        features = self._model.get_text_features(input_ids=tokens["input_ids"].to(self._device))
        return _normalised(features.pooler_output)[0]

    def _load_head(self, embedding_size: int | None) -> torch.nn.Module:
        if embedding_size != 768:
            raise ValueError(
                f"score=aesthetic needs a CLIP whose embeddings have 768 numbers, {self.folder}'s "
                f"have {embedding_size}; give openai/clip-vit-large-patch14's folder"
            )
        for folder in (self.folder, self.folder.parent):
            if (folder / self.head).is_file():
                return load_aesthetic_head(folder / self.head)
        raise ValueError(
            f"head={self.head} is neither in {self.folder} nor beside it; put the aesthetic "
            "predictor's layers there (sac+logos+ava1-l14-linearMSE.pth)"
        )


def _image(sample: RewardSample) -> np.ndarray:
    """Return the picture [H, W, 3]. Raises ValueError for a video."""
    if len(sample.pixels) != 1:
        raise ValueError(
            f"a clip reward scores pictures, and got a video of {len(sample.pixels)} frames; "
            "use type: frame, args: {reward: clip, args: {…}, frames: 3}"
        )
    return sample.pixels[0]


def pad_to_square(image: np.ndarray, side: int) -> np.ndarray:
    """Scale the longest side to `side`, and pad the other with black on both sides alike.

    image: [H, W, 3] uint8. As ResizeMaxSize in HPSv2's transform.py: bicubic, rounded sizes.
    """
    height, width = image.shape[:2]
    scale = side / max(height, width)
    new_height = max(1, round(height * scale))
    new_width = max(1, round(width * scale))
    resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (side, side))
    square.paste(resized, ((side - new_width) // 2, (side - new_height) // 2))
    return np.asarray(square)


def _normalised(features: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(features.float(), dim=-1)
