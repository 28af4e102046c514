"""Adapt BAGEL's generation expert to the trainer: prompt ids, guidance, schedule and latents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megadiff.diffusion.guidance import clamped_cfg
from megadiff.diffusion.schedule import static_shift, wan_sigmas
from megadiff.models.adapter import ModelAdapter, PromptEncoder, check_pixels
from megadiff.models.bagel.attention import NUM_MARKS
from megadiff.models.bagel.networks import other_networks
from megadiff.models.bagel.plan import PLAN
from megadiff.models.bagel.transformer import BagelSizes, BagelTransformer
from megadiff.models.conditioning import Conditioning, text_of_side
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.packing import TokenGrid
from megadiff.models.pipeline_folder import Index
from megadiff.tensors.model_files import ROOT_FILE, open_weights, read_json
from megadiff.types import Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes

VAE_FACTOR = 8
FLOW_SHIFT = 3.0  # BagelPipeline's timestep_shift for images
# sigmas above which BagelPipeline guides, by its own default
GUIDED_ABOVE = 0.4
SETTINGS = ("vit_config.json", "preprocessor_config.json", "tokenizer_config.json")
TEXT_MARKS = ("<|im_start|>", "<|im_end|>")
IMAGE_MARKS = ("<|vision_start|>", "<|vision_end|>")


class BagelAdapter(ModelAdapter):
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
    components = ("transformer",)
    plan = PLAN
    # the decoder of FLUX.1, whose last levels have 128 channels
    decoding = Decoding(pixels={"cpu": 2**16, "cuda": 2**20}, bytes_per_pixel=2560)
    frames_per_s = 1
    veomni_splits_tokens = False
    max_prompt_tokens = 1024
    vae_class = "AutoencoderKL"  # unused: ae.safetensors is not in diffusers' layout
    supervised_obstacle = (
        "its autoencoder is not in diffusers' layout, so that images cannot be encoded"
    )
    tokenizer_class = "Qwen2Tokenizer"
    tokenizer_folder = "."

    def __init__(self, model_folder: Path | str) -> None:
        """Read the sizes from model_folder, in the published layout."""
        self.model_folder = Path(model_folder)
        self.sizes = BagelSizes.read(self.model_folder)
        # keys have fewer heads than queries, so theirs limit how far attention can be split
        self.num_heads = self.sizes.num_kv_heads
        self.width = self.sizes.width
        # two thirds of a gated MLP's three matrices are as large as both of a plain one
        self.mlp_ratio = 1.5 * self.sizes.mlp_width / self.width
        self.pixels_per_token = VAE_FACTOR * self.sizes.patch

    @classmethod
    def recognises(cls, folder: Path, index: Index) -> bool:
        config = folder / "config.json"
        return (
            not index
            and config.is_file()
            and (read_json(config).get("architectures") == [cls.pipeline_class])
        )

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
        return other_networks(self.model_folder, self.sizes)

    def component_of(self, sigma: float) -> str:
        return self.components[0]

    def empty_transformer(self, component: str = "transformer") -> BagelTransformer:
        with torch.device("meta"):
            return BagelTransformer(self.sizes)

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        from megadiff.models.bagel.attention import BagelAttention

        return BagelAttention(tokens)

    def validate(self, sampling: Sampling) -> None:
        check_pixels(sampling, self.pixels_per_token)
        largest = self.sizes.table_side * self.pixels_per_token
        for name, pixels in (("height", sampling.height), ("width", sampling.width)):
            if pixels > largest:
                raise ValueError(
                    f"rollout.{name}={pixels} is more than {largest}, the side of BAGEL's table of "
                    f"positions; set rollout.{name}<={largest}"
                )
        fixed = {"num_frames": 1, "true_cfg_scale": 1.0, "guidance_scale_2": 0.0}
        for name, value in fixed.items():
            if getattr(sampling, name) != value:
                raise ValueError(
                    f"rollout.{name}={getattr(sampling, name)}, but BAGEL makes images with "
                    f"rollout.guidance_scale alone; set rollout.{name}={value:g}"
                )
        if sampling.images:
            raise ValueError(
                "rollout.images=true, but BAGEL makes images from text alone here; set it to false"
            )
        if sampling.guidance_scale < 1:
            raise ValueError(
                f"rollout.guidance_scale={sampling.guidance_scale} < 1 (off); set it to 1 or more"
            )

    def grid(self, sampling: Sampling) -> TokenGrid:
        rows, columns = (
            size // self.pixels_per_token for size in (sampling.height, sampling.width)
        )
        return TokenGrid(frames=1, rows=rows, columns=columns)

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        return self.grid(sampling).num_tokens, self.sizes.patch**2 * self.sizes.latent_channels

    def schedule(self, sampling: Sampling) -> Tensor:
        """Return [T+1] float32 sigmas: T steps are BagelPipeline's num_timesteps = T + 1."""
        return wan_sigmas(sampling.num_inference_steps, flow_shift=FLOW_SHIFT)

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        return static_shift(sigmas, shift=FLOW_SHIFT)

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if sampling.guidance_scale > 1 else 1

    def velocity(
        self,
        transformer: Any,
        latents_BLC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
        *,
        component: str = "transformer",
    ) -> Tensor:
        """Return velocity [B, L, C] float32, guided where sigma is above GUIDED_ABOVE.

        conditioning: prompt_ids and prompt_mask [B, tokens], and the same with negative_ in front
        under guidance. Masks on the CPU save a device synchronisation.
        """
        device = latents_BLC.device
        grid = self.grid(sampling)
        columns = torch.arange(grid.columns)
        cells = torch.arange(grid.rows)[:, None] * self.sizes.table_side + columns

        def one_pass(prefix: str) -> Tensor:
            context = _context(**text_of_side(conditioning, prefix, device))
            (velocity_BLC,) = transformer(
                hidden_states=latents_BLC.to(transformer.dtype),
                timestep=sigma_B.float().to(device),
                position_ids=cells.flatten().expand(len(latents_BLC), -1).to(device),
                **context,
            )
            return velocity_BLC.float()

        positive_BLC = one_pass("")
        if not self.is_guided(sampling):
            return positive_BLC
        # always both: ranks whose rows have other sigmas would else differ in their collectives
        guided_BLC = clamped_cfg(positive_BLC, one_pass("negative_"), sampling.guidance_scale)
        is_guided_B = sigma_B.to(device) > GUIDED_ABOVE
        return torch.where(is_guided_B[:, None, None], guided_BLC, positive_BLC)

    @contextmanager
    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[PromptEncoder]:
        """Give ids alone: the transformer itself has the understanding expert."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_folder)

        yield lambda texts, images=(): encode_texts(tokenizer, texts)

    @torch.no_grad()
    def decode(
        self, vae: Any, latents_NLC: Tensor, sampling: Sampling, conditioning: Conditioning
    ) -> Tensor:
        """Return uint8 [N, 1, H, W, 3] on the CPU. vae: vllm-omni's AutoEncoder."""
        parameter = next(vae.parameters())
        size = self.decoding.num_rows(
            parameter.device.type, num_frames=1, height=sampling.height, width=sampling.width
        )
        images = []
        for rows_BLC in latents_NLC.split(size):
            pixels_BCHW = vae.decode(self.unpack(rows_BLC, sampling).to(parameter))
            scaled = (pixels_BCHW.float() * 0.5 + 0.5).clamp(0, 1) * 255
            images.append(scaled.round().to(torch.uint8).permute(0, 2, 3, 1)[:, None].cpu())
        return torch.cat(images)

    def unpack(self, latents_BLC: Tensor, sampling: Sampling) -> Tensor:
        """Return [B, C, H, W]. A token's numbers are (row, column, channel) of its patch."""
        patch = self.sizes.patch
        grid = self.grid(sampling)
        cells = grid.rows, grid.columns
        latents = latents_BLC.unflatten(2, (patch, patch, -1)).unflatten(1, cells)
        return latents.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)

    def blank_text(self, num_tokens: int) -> dict[str, Tensor]:
        width = max(num_tokens, NUM_MARKS)
        return {
            "prompt_ids": torch.zeros(1, width, dtype=torch.long),
            "prompt_mask": torch.ones(1, width, dtype=torch.bool),
        }

    def num_text_tokens(self, conditioning: Conditioning) -> int:
        return conditioning["prompt_mask"].shape[1]

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        return TokenCount(image=self.latents_shape(sampling)[0], text=num_text_tokens)

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
    width = max(map(len, rows)) + NUM_MARKS
    padded = [[*ids, *marks, *[0] * (width - NUM_MARKS - len(ids))] for ids in rows]
    lengths_B = torch.tensor([len(ids) + NUM_MARKS for ids in rows])
    return {
        "prompt_ids": torch.tensor(padded),
        "prompt_mask": torch.arange(width) < lengths_B[:, None],
    }


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
