"""Adapt BAGEL's generation expert to the trainer: prompt ids, guidance, schedule and latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megadiff.diffusion.guidance import clamped_cfg
from megadiff.models.adapter import Images
from megadiff.models.bagel.attention import NUM_MARKS, BagelAttention
from megadiff.models.bagel.plan import PLAN
from megadiff.models.bagel.transformer import BagelSizes, BagelTransformer
from megadiff.models.conditioning import Conditioning
from megadiff.models.decoding import Decoding
from megadiff.models.image_family import ImageFamily
from megadiff.models.other_networks import autoencoder_parameters, vision_parameters
from megadiff.models.packing import PATCH, pad_rows, unpack
from megadiff.models.pipeline_folder import Index
from megadiff.models.vae import to_uint8
from megadiff.tensors.model_files import ROOT_FILE, open_weights, read_json
from megadiff.types import Sampling, Tensors

FLOW_SHIFT = 3.0  # BagelPipeline's timestep_shift for images
# sigmas above which BagelPipeline guides, by its own default
GUIDED_ABOVE = 0.4
PUBLISHED_LAYERS = 27  # of the vision tower, the last of which is not used
PATCHES_A_SIDE = 70  # default of vit_max_num_patch_per_side
SETTINGS = ("vit_config.json", "preprocessor_config.json", "tokenizer_config.json")
TEXT_MARKS = ("<|im_start|>", "<|im_end|>")
IMAGE_MARKS = ("<|vision_start|>", "<|vision_end|>")


class BagelAdapter(ImageFamily):
    """Train the generation expert; the understanding expert is frozen.

    That is exact: text is causal and comes first, so that it never depends on a trained weight.
    A conditioning has ids: the prompt's between its two marks, then the image's two marks. A blank
    negative text is the image's marks alone, the branch without a prompt.
    """

    title = "BAGEL 7B-MoT"
    published = {"generation expert": ""}
    pipeline_class = "BagelForConditionalGeneration"  # of config.json, as there is no index
    transformer_class = "BagelTransformer"
    rollout_pipeline = "megadiff.models.bagel.pipeline:BagelRolloutPipeline"
    stage_topology = "bagel_single_stage"
    stage_class = "BagelPipeline"
    num_end_marks = NUM_MARKS
    plan = PLAN
    attention = staticmethod(BagelAttention)
    # the decoder of FLUX.1, whose last levels have 128 channels
    decoding = Decoding(pixels={"cpu": 2**16, "cuda": 2**20}, bytes_per_pixel=2560)
    max_prompt_tokens = 1024
    supervised_obstacle = (
        "its autoencoder is not in diffusers' layout, so that images cannot be encoded"
    )
    tokenizer_class = "Qwen2Tokenizer"
    tokenizer_folder = "."

    def __init__(self, model_folder: Path | str) -> None:
        """Read the sizes from model_folder, in the published layout."""
        self.model_folder = Path(model_folder)
        self.sizes = BagelSizes.read(self.model_folder)
        self.channels = self.sizes.latent_channels
        self.positions_per_side = self.sizes.table_side
        # keys have fewer heads than queries, so theirs limit how far attention can be split
        self.num_heads = self.sizes.num_kv_heads
        self.width = self.sizes.width
        # two thirds of a gated MLP's three matrices are as large as both of a plain one
        self.mlp_ratio = 1.5 * self.sizes.mlp_width / self.width

    @classmethod
    def recognises(cls, folder: Path, index: Index) -> bool:
        config = folder / "config.json"
        if index or not config.is_file():
            return False
        return read_json(config).get("architectures") == [cls.pipeline_class]

    @classmethod
    def folder_problems(cls, folder: Path, index: Index) -> Iterator[str]:
        try:
            for name in SETTINGS:
                read_json(folder / name)
            BagelSizes.read(folder)
            for name in (ROOT_FILE, "ae.safetensors"):
                open_weights(folder / name)
        except ValueError as error:
            yield str(error)

    @classmethod
    def component_configs(cls, folder: Path, index: Index) -> dict[str, Path]:
        # BagelSizes.read checks the sizes, which two files of the root have
        return {}

    def root_networks(self) -> dict[str, int]:
        vision = read_json(self.model_folder / "vit_config.json")
        if vision["num_hidden_layers"] == PUBLISHED_LAYERS:
            vision["num_hidden_layers"] -= 1
        config = read_json(self.model_folder / "config.json")
        side = config.get("vit_max_num_patch_per_side", PATCHES_A_SIDE)
        # two linear layers with their biases, and a table of positions
        connector = vision["hidden_size"] + 1 + self.width + 1 + side**2
        return {
            # for the text that the model writes: the head and the last norm
            "language head": (self.sizes.vocabulary + 1) * self.width,
            "vision tower": vision_parameters(vision) + connector * self.width,
            "autoencoder": autoencoder_parameters(),
        }

    def empty_transformer(self, component: str = "transformer") -> BagelTransformer:
        with torch.device("meta"):
            return BagelTransformer(self.sizes)

    def static_shift(self) -> float:
        return FLOW_SHIFT  # T steps are BagelPipeline's num_timesteps = T + 1

    def packed_pass(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Tensor:
        """Return velocity [B, L, C]. text: prompt_ids and prompt_mask [B, tokens]."""
        grid = self.grid(sampling)
        rows = torch.arange(grid.rows)[:, None] * self.sizes.table_side
        cells_L = (rows + torch.arange(grid.columns)).flatten()
        (velocity_BLC,) = transformer(
            hidden_states=latents_BLC,
            timestep=sigma_B,
            position_ids=cells_L.expand(len(latents_BLC), -1).to(latents_BLC.device),
            **_context(**text),
        )
        return velocity_BLC.float()  # guidance is in float32

    def guide(
        self, positive_BLC: Tensor, negative_BLC: Tensor, scale: float, sigma_B: Tensor
    ) -> Tensor:
        """Guide rows whose sigma is above GUIDED_ABOVE."""
        guided_BLC = clamped_cfg(positive_BLC, negative_BLC, scale)
        return torch.where((sigma_B > GUIDED_ABOVE)[:, None, None], guided_BLC, positive_BLC)

    def text_pipeline(self, dtype: torch.dtype) -> Any:
        """Load the tokenizer alone: the transformer itself has the understanding expert."""
        from transformers import AutoTokenizer

        return SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(self.model_folder))

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        return encode_texts(pipeline.tokenizer, texts)

    @torch.no_grad()
    def decode(
        self, vae: Any, latents_NLC: Tensor, sampling: Sampling, conditioning: Conditioning
    ) -> Tensor:
        """Return uint8 [N, 1, H, W, 3] on the CPU. vae: vllm-omni's AutoEncoder."""
        parameter = next(vae.parameters())
        size = self.decoding.num_rows(
            parameter.device.type, num_frames=1, height=sampling.height, width=sampling.width
        )
        # A token's numbers are (row, column, channel) of its patch; unpack() wants channels first.
        latents_NLC = latents_NLC.unflatten(2, (PATCH**2, -1)).transpose(2, 3).flatten(2)
        images = []
        for latents_BCFHW in unpack(latents_NLC, self.grid(sampling)).split(size):
            pixels_BCHW = vae.decode(latents_BCFHW.squeeze(2).to(parameter))
            images.append(to_uint8(pixels_BCHW).permute(0, 2, 3, 1)[:, None].cpu())
        return torch.cat(images)

    def blank_text(self, num_tokens: int) -> Tensors:
        width = max(num_tokens, NUM_MARKS)
        return {
            "prompt_ids": torch.zeros(1, width, dtype=torch.long),
            "prompt_mask": torch.ones(1, width, dtype=torch.bool),
        }

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Count linear layers and attention; twice that under guidance."""
        sizes = self.sizes
        num_tokens = self.latents_shape(sampling)[0] + num_text_tokens
        kv_width = sizes.num_kv_heads * sizes.head_dim
        # 2 operations a multiply-add; a token passes through one expert
        weights = 2 * self.width * (self.width + kv_width) + 3 * self.width * sizes.mlp_width
        one_pass = 2 * num_tokens * weights + 4 * num_tokens**2 * self.width
        return float(sizes.num_layers * one_pass * self.num_passes("transformer", sampling))


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> dict[str, Tensor]:
    """Encode texts as BagelPipeline does, each between its marks; a blank one has no tokens."""
    start, end = tokenizer.convert_tokens_to_ids(list(TEXT_MARKS))
    rows: list[list[int]] = []
    for text in texts:
        ids = [start, *tokenizer.encode(text, add_special_tokens=False), end]
        rows.append(ids if text.strip() else [])
    return with_image_marks(tokenizer, rows)


def with_image_marks(tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return prompt_ids and prompt_mask [B, tokens]: each row's ids, then the image's two marks."""
    marks = tokenizer.convert_tokens_to_ids(list(IMAGE_MARKS))
    ids_BT, mask_BT = pad_rows([torch.tensor([*ids, *marks]) for ids in rows])
    return {"prompt_ids": ids_BT, "prompt_mask": mask_BT}


def _context(prompt_ids: Tensor, prompt_mask: Tensor) -> dict[str, Tensor]:
    """Return forward's arguments of a text: prompts padded to the longest, then the two marks."""
    lengths_B = prompt_mask.sum(dim=1) - NUM_MARKS
    width = int(lengths_B.max())
    # a row's marks come right behind its own text
    marks_B2 = lengths_B[:, None] + torch.arange(NUM_MARKS, device=lengths_B.device)
    marks_ids = prompt_ids.gather(1, marks_B2.to(prompt_ids.device))
    mask_BT = torch.arange(width, device=lengths_B.device) < lengths_B[:, None]
    return {
        "context_ids": torch.cat([prompt_ids[:, :width], marks_ids], dim=1),
        "prompt_mask": mask_BT.to(prompt_ids.device, non_blocking=True),
    }
