"""Qwen-Image for the trainer: packed latents, text conditioning, timestep unit, true CFG, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megadiff.diffusion.guidance import true_cfg
from megadiff.diffusion.schedule import qwen_image_shift, qwen_image_sigmas
from megadiff.models.adapter import Conditioning, ImageEncoder, PromptEncoder
from megadiff.models.decoding import TokenCount
from megadiff.models.encoders import EncodesPrompts, freed
from megadiff.models.qwen_image.plan import PLAN
from megadiff.models.qwen_image.rotary import rotate_in_real
from megadiff.models.qwen_image.streams import keep_streams_in_float32
from megadiff.models.qwen_image.vae import DECODING, convolve_single_frames_in_2d
from megadiff.tensors.model_files import read_json
from megadiff.types import Prompt, Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes

PIXELS_PER_TOKEN = 16  # the VAE divides height and width by 8, packing 2×2 latents by 2 more
MAX_PROMPT_TOKENS = 1024  # as in the pipeline of diffusers


class QwenImageAdapter(EncodesPrompts):
    """Fulfils models.adapter.ModelAdapter. Works with diffusers' own transformer and with every engine's."""

    components = ("transformer",)
    plan, decoding = PLAN, DECODING
    mlp_ratio, frames_per_s = 4.0, 1
    veomni_splits_tokens = True

    def __init__(self, model_folder: Path | str) -> None:
        """model_folder: a diffusers pipeline folder. Raises ValueError when transformer/config.json is missing, or of an
        editing model, which modulates the tokens of its input image differently."""
        self.model_folder = Path(model_folder)
        config = read_json(self.model_folder / "transformer" / "config.json")
        if config.get("zero_cond_t"):
            raise ValueError(
                f"{model_folder}/transformer has zero_cond_t=true, an editing model; use a text-to-image one"
            )
        self.channels: int = config["in_channels"]
        self.num_layers: int = config["num_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.width: int = config["num_attention_heads"] * config["attention_head_dim"]

    def component_of(self, sigma: float) -> str:
        return self.components[0]

    def empty_transformer(self, component: str = "transformer") -> nn.Module:
        from accelerate import init_empty_weights
        from diffusers import QwenImageTransformer2DModel

        with init_empty_weights():
            return QwenImageTransformer2DModel.from_config(
                QwenImageTransformer2DModel.load_config(self.model_folder / component)
            )

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        from megadiff.models.qwen_image.attention import QwenImageAttention

        return QwenImageAttention(tokens)

    def adapt_veomni_module(self, transformer: nn.Module) -> None:
        rotate_in_real(transformer)

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        keep_streams_in_float32(transformer, dtype)

    def check_float32_streams(self) -> None:
        pass

    def validate(self, sampling: Sampling) -> None:
        for name, pixels in (("height", sampling.height), ("width", sampling.width)):
            if pixels < PIXELS_PER_TOKEN or pixels % PIXELS_PER_TOKEN:
                nearest = max(round(pixels / PIXELS_PER_TOKEN), 1) * PIXELS_PER_TOKEN
                raise ValueError(
                    f"rollout.{name}={pixels} is not a positive multiple of {PIXELS_PER_TOKEN} (pixels a token); "
                    f"set rollout.{name}={nearest}"
                )
        if sampling.num_frames != 1:
            raise ValueError(
                f"rollout.num_frames={sampling.num_frames}, but Qwen-Image makes images; set it to 1"
            )
        if sampling.first_frame:
            raise ValueError(
                "rollout.first_frame=true, but Qwen-Image makes images from text alone; set it to false"
            )
        if sampling.true_cfg_scale < 1:
            raise ValueError(
                f"rollout.true_cfg_scale={sampling.true_cfg_scale} < 1 (off); set it to 1 or more"
            )
        if sampling.guidance_scale != 1:
            raise ValueError(
                f"rollout.guidance_scale={sampling.guidance_scale}, but Qwen-Image's guidance is true CFG; "
                "set rollout.true_cfg_scale instead and leave guidance_scale at 1"
            )
        if sampling.guidance_scale_2:
            raise ValueError(
                f"rollout.guidance_scale_2={sampling.guidance_scale_2}, but this model has no second component; set it to 0"
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """A token is at least one byte, so that only texts of more bytes than that are tokenised at all."""
        texts = dict.fromkeys(
            text for prompt in prompts for text in (prompt.text, prompt.negative_text)
        )
        long = [text for text in texts if len(text.encode()) > MAX_PROMPT_TOKENS]
        if not long:
            return
        from transformers import Qwen2Tokenizer

        tokenizer = Qwen2Tokenizer.from_pretrained(self.model_folder / "tokenizer")
        for text in long:
            count = len(tokenizer(text).input_ids)
            if count > MAX_PROMPT_TOKENS:
                raise ValueError(
                    f"a prompt has {count} tokens ({len(text)} characters), the model takes {MAX_PROMPT_TOKENS}; "
                    f"shorten {text[:60]!r}…"
                )

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        rows, columns = _grid(sampling)
        return rows * columns, self.channels

    def schedule(self, sampling: Sampling) -> Tensor:
        """Raises ValueError without scheduler/scheduler_config.json: its defaults in code are another schedule."""
        num_tokens, _ = self.latents_shape(sampling)
        return qwen_image_sigmas(
            sampling.num_inference_steps,
            num_tokens=num_tokens,
            scheduler_config=self._scheduler_config(),
        )

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        num_tokens, _ = self.latents_shape(sampling)
        return qwen_image_shift(
            sigmas, num_tokens=num_tokens, scheduler_config=self._scheduler_config()
        )

    def _scheduler_config(self) -> dict[str, object]:
        return read_json(self.model_folder / "scheduler" / "scheduler_config.json")

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if sampling.true_cfg_scale > 1 else 1

    def velocity(
        self,
        transformer: Callable[..., tuple[Tensor]],
        latents_BLC: Tensor,
        sigma_B: Tensor,
        conditioning: Conditioning,
        sampling: Sampling,
        *,
        component: str = "transformer",
    ) -> Tensor:
        """Velocity [B, L, C] float32, guided by true CFG (both passes with gradient) when true_cfg_scale > 1.

        latents_BLC: packed latents. sigma_B: [B] in [0, 1], the transformer's time unit; it is rounded once, from
        float32 to the compute dtype, inside the transformer. conditioning: prompt_embeds [B, tokens, D], prompt_mask
        [B, tokens], and the same with negative_ in front under CFG. Masks on the CPU save a device synchronisation.
        Guidance is computed in the transformer's output dtype, as in the replica. Under CFG there are always two
        passes: one of 2B where widths agree would let ranks differ in their number of passes, and collectives hang.
        """
        positive = _trim(
            conditioning["prompt_embeds"], conditioning["prompt_mask"], latents_BLC.device
        )
        if sampling.true_cfg_scale <= 1:
            return _forward(transformer, latents_BLC, sigma_B, *positive, sampling).float()
        negative = _trim(*_negative(conditioning), latents_BLC.device)
        velocity_BLC = _forward(transformer, latents_BLC, sigma_B, *positive, sampling)
        negative_velocity_BLC = _forward(transformer, latents_BLC, sigma_B, *negative, sampling)
        return true_cfg(velocity_BLC, negative_velocity_BLC, sampling.true_cfg_scale).float()

    @contextmanager
    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[PromptEncoder]:
        """By the checkpoint's template and text encoder."""
        from diffusers import QwenImagePipeline

        pipeline = QwenImagePipeline.from_pretrained(
            self.model_folder, transformer=None, vae=None, scheduler=None, torch_dtype=dtype
        ).to(device)

        @torch.no_grad()
        def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
            embeds_BTD, mask_BT = pipeline.encode_prompt(
                list(texts), max_sequence_length=MAX_PROMPT_TOKENS
            )
            if mask_BT is None:
                mask_BT = torch.ones(embeds_BTD.shape[:2], dtype=torch.bool)
            return embeds_BTD.cpu(), mask_BT.bool().cpu()

        with freed(pipeline.text_encoder):
            yield encode

    @contextmanager
    def image_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[ImageEncoder]:
        """By the checkpoint's VAE: the mean of its posterior, as a sample would add noise that training had to learn.

        Latents come back on the device. dtype: of the VAE; they are normalised in float32.
        """
        from diffusers import AutoencoderKLQwenImage

        vae = AutoencoderKLQwenImage.from_pretrained(
            self.model_folder / "vae", torch_dtype=dtype
        ).to(device)
        convolve_single_frames_in_2d(vae)
        mean_C, std_C = (
            torch.tensor(vae.config[f"latents_{name}"], device=device) for name in ("mean", "std")
        )

        @torch.no_grad()
        def encode(pixels_BHWC: Tensor) -> Tensor:
            images_BCHW = pixels_BHWC.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
            latents_BCHW = (
                vae.encode(images_BCHW.to(dtype).unsqueeze(2)).latent_dist.mean.squeeze(2).float()
            )
            return _pack((latents_BCHW - mean_C[:, None, None]) / std_C[:, None, None])

        with freed(vae):
            yield encode

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        return TokenCount(image=self.latents_shape(sampling)[0], text=num_text_tokens)

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Linear layers, attention and modulation of one forward pass; twice that under true CFG."""
        num_tokens = self.latents_shape(sampling)[0] + num_text_tokens
        d, layers = self.width, self.num_layers
        one_pass = layers * (24 * num_tokens * d**2 + 4 * num_tokens**2 * d + 24 * d**2)
        return float(one_pass * (2 if sampling.true_cfg_scale > 1 else 1))


def _pack(latents_BCHW: Tensor) -> Tensor:
    """[B, C, 2h, 2w] → [B, h·w, 4C]: 2×2 latents a token, as QwenImagePipeline._pack_latents."""
    batch, channels, height, width = latents_BCHW.shape
    blocks = latents_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(
        batch, (height // 2) * (width // 2), channels * 4
    )


def _forward(
    transformer: Callable[..., tuple[Tensor]],
    latents_BLC: Tensor,
    sigma_B: Tensor,
    embeds_BTD: Tensor,
    mask_BT: Tensor | None,
    sampling: Sampling,
) -> Tensor:
    """One pass of the transformer, [B, L, C] in its output dtype."""
    device, dtype = latents_BLC.device, transformer.dtype
    velocity_BLC = transformer(
        hidden_states=latents_BLC.to(dtype),
        timestep=sigma_B.float().to(device),
        encoder_hidden_states=embeds_BTD.to(dtype),
        encoder_hidden_states_mask=None
        if mask_BT is None
        else mask_BT.to(device, non_blocking=True),
        # of one sample: only the first is read, and FSDP2 walks through an entry per sample, which took half of a small step
        img_shapes=[[(1, *_grid(sampling))]],
        return_dict=False,
    )[0]
    return velocity_BLC


def _trim(
    embeds_BTD: Tensor, mask_BT: Tensor, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The embeddings on the device without the columns that no sample uses (cut there: the host would copy what it cuts); no
    mask when all that is left is used: it costs the fast kernels.

    Text rotary positions count from the image's size on, whatever the width, so padding or cutting it changes nothing.
    """
    used_T = mask_BT.bool().any(dim=0).nonzero()
    width = int(used_T[-1]) + 1 if len(used_T) else 0
    if width == 0:
        raise ValueError("prompt_mask has no True at all: a prompt must have at least one token")
    mask_BT = mask_BT[:, :width].bool()
    return embeds_BTD.to(device, non_blocking=True)[:, :width], None if bool(
        mask_BT.all()
    ) else mask_BT


def _negative(conditioning: Conditioning) -> tuple[Tensor, Tensor]:
    missing = [
        name
        for name in ("negative_prompt_embeds", "negative_prompt_mask")
        if name not in conditioning
    ]
    if missing:
        raise ValueError(
            f"rollout.true_cfg_scale > 1 needs {', '.join(missing)} in the conditioning {sorted(conditioning)}; "
            "sample with the same true_cfg_scale as training uses"
        )
    return conditioning["negative_prompt_embeds"], conditioning["negative_prompt_mask"]


def _grid(sampling: Sampling) -> tuple[int, int]:
    return sampling.height // PIXELS_PER_TOKEN, sampling.width // PIXELS_PER_TOKEN
