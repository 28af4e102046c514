"""Adapt Qwen-Image to the trainer: latents, conditioning, timestep unit, true CFG, schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megadiff.diffusion.guidance import true_cfg
from megadiff.diffusion.schedule import qwen_image_shift, qwen_image_sigmas
from megadiff.models.adapter import (
    Conditioning,
    ModelAdapter,
    PromptEncoder,
    check_pixels,
    encoded_text,
    freed,
)
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.qwen_image.plan import PLAN
from megadiff.models.qwen_image.rotary import rotate_in_real
from megadiff.models.qwen_image.streams import keep_streams_in_float32
from megadiff.models.qwen_image.vae import convolve_single_frames_in_2d
from megadiff.tensors.model_files import read_json
from megadiff.types import Sampling

if TYPE_CHECKING:
    from megadiff.parallel.attention import TokenAttention, TokenAxes

PIXELS_PER_TOKEN = 16  # the VAE divides height and width by 8, packing 2×2 latents by 2 more


class QwenImageAdapter(ModelAdapter):
    """Work with diffusers' own transformer and every engine's."""

    components = ("transformer",)
    plan = PLAN
    # A CPU is faster where a call's pixels stay in its caches. A GPU takes 145 ms for 16 images of
    # 512², four at a time; all at once take 139 ms, but 12.8 GiB in place of 3.2.
    decoding = Decoding(pixels={"cpu": 2**16, "cuda": 2**20}, bytes_per_pixel=3328)
    mlp_ratio = 4.0
    frames_per_s = 1
    veomni_splits_tokens = True
    max_prompt_tokens = 1024  # as in the pipeline of diffusers
    transformer_class = "QwenImageTransformer2DModel"
    vae_class = "AutoencoderKLQwenImage"
    tokenizer_class = "Qwen2Tokenizer"
    adapt_veomni_module = staticmethod(rotate_in_real)
    adapt_vae = staticmethod(convolve_single_frames_in_2d)
    keep_streams_in_float32 = staticmethod(keep_streams_in_float32)

    def __init__(self, model_folder: Path | str) -> None:
        """Read the sizes from model_folder, a diffusers pipeline folder.

        Raises ValueError when transformer/config.json is missing, or of an editing model.
        """
        self.model_folder = Path(model_folder)
        config = read_json(self.model_folder / "transformer" / "config.json")
        if config.get("zero_cond_t"):  # modulates the tokens of its input image differently
            raise ValueError(
                f"{model_folder}/transformer has zero_cond_t=true, an editing model; "
                "use a text-to-image one"
            )

        self.channels: int = config["in_channels"]
        self.num_layers: int = config["num_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.width: int = config["num_attention_heads"] * config["attention_head_dim"]

    def component_of(self, sigma: float) -> str:
        return self.components[0]

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        from megadiff.models.qwen_image.attention import QwenImageAttention

        return QwenImageAttention(tokens)

    def validate(self, sampling: Sampling) -> None:
        check_pixels(sampling, PIXELS_PER_TOKEN)
        if sampling.num_frames != 1:
            raise ValueError(
                f"rollout.num_frames={sampling.num_frames}, but Qwen-Image makes images; "
                "set it to 1"
            )
        if sampling.images:
            raise ValueError(
                "rollout.images=true, but Qwen-Image makes images from text alone; set it to false"
            )

        if sampling.true_cfg_scale < 1:
            raise ValueError(
                f"rollout.true_cfg_scale={sampling.true_cfg_scale} < 1 (off); set it to 1 or more"
            )
        if sampling.guidance_scale != 1:
            raise ValueError(
                f"rollout.guidance_scale={sampling.guidance_scale}, but Qwen-Image's guidance is "
                "true CFG; set rollout.true_cfg_scale instead and leave guidance_scale at 1"
            )
        if sampling.guidance_scale_2:
            raise ValueError(
                f"rollout.guidance_scale_2={sampling.guidance_scale_2}, but this model has no "
                "second component; set it to 0"
            )

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        rows, columns = _grid(sampling)
        return rows * columns, self.channels

    def schedule(self, sampling: Sampling) -> Tensor:
        """Return [T+1] float32 sigmas. Raises ValueError without scheduler_config.json."""
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
        # the file itself: the defaults of diffusers' code are another schedule
        return read_json(self.model_folder / "scheduler" / "scheduler_config.json")

    def num_passes(self, component: str, sampling: Sampling) -> int:
        return 2 if sampling.true_cfg_scale > 1 else 1

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
        """Return velocity [B, L, C] float32, guided by true CFG when true_cfg_scale > 1.

        latents_BLC: packed latents.
        sigma_B: [B] in [0, 1], the transformer's time unit. It is rounded once, from float32 to the
        compute dtype, inside the transformer.
        conditioning: prompt_embeds [B, tokens, D], prompt_mask [B, tokens], and the same with
        negative_ in front under CFG. Masks on the CPU save a device synchronisation.
        """
        device = latents_BLC.device
        dtype = transformer.dtype

        def one_pass(embeds_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
            return transformer(
                hidden_states=latents_BLC.to(dtype),
                timestep=sigma_B.float().to(device),
                encoder_hidden_states=embeds_BTD.to(dtype),
                encoder_hidden_states_mask=mask_BT,
                # of one sample: only the first is read, and FSDP2 walks through an entry per
                # sample, which took half of a small step
                img_shapes=[[(1, *_grid(sampling))]],
                return_dict=False,
            )[0]

        positive = _trim(*encoded_text(conditioning, ""), device)
        if not self.is_guided(sampling):
            return one_pass(*positive).float()

        # Both passes carry gradient. Always two: one of 2B where widths agree would let ranks
        # differ in their number of passes, and collectives hang. Guidance is computed in the
        # transformer's output dtype, as in the replica.
        negative = _trim(*encoded_text(conditioning, "negative_"), device)
        return true_cfg(one_pass(*positive), one_pass(*negative), sampling.true_cfg_scale).float()

    @contextmanager
    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[PromptEncoder]:
        """Encode by the checkpoint's template and text encoder."""
        from diffusers import QwenImagePipeline

        # None: of the whole pipeline only the tokenizer and the text encoder are loaded
        pipeline = QwenImagePipeline.from_pretrained(
            self.model_folder, transformer=None, vae=None, scheduler=None, torch_dtype=dtype
        ).to(device)

        @torch.no_grad()
        def encode(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
            embeds_BTD, mask_BT = pipeline.encode_prompt(
                list(texts), max_sequence_length=self.max_prompt_tokens
            )
            # diffusers drops a mask that is all true
            if mask_BT is None:
                mask_BT = torch.ones(embeds_BTD.shape[:2], dtype=torch.bool)
            return embeds_BTD.cpu(), mask_BT.bool().cpu()

        with freed(pipeline.text_encoder):
            yield encode

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        return TokenCount(image=self.latents_shape(sampling)[0], text=num_text_tokens)

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Count linear layers, attention and modulation; twice that under true CFG."""
        num_tokens = self.latents_shape(sampling)[0] + num_text_tokens
        d = self.width
        # 2 operations a multiply-add. A block's linear layers have 12·d² weights for each token,
        # attention is two products, and the modulations have 12·d² weights for each sample.
        one_pass = self.num_layers * (24 * num_tokens * d**2 + 4 * num_tokens**2 * d + 24 * d**2)
        return float(one_pass * self.num_passes("transformer", sampling))


def _trim(
    embeds_BTD: Tensor, mask_BT: Tensor, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return embeddings on the device and their mask, without the columns that no sample uses.

    The mask is None when all that is left is used: a mask costs the fast kernels.
    """
    # Text rotary positions count from the image's size on, whatever the width, so that padding or
    # cutting it changes nothing.
    used_T = mask_BT.bool().any(dim=0).nonzero()
    width = int(used_T[-1]) + 1 if len(used_T) else 0
    if width == 0:
        raise ValueError("prompt_mask has no True at all: a prompt must have at least one token")

    mask_BT = mask_BT[:, :width].bool()
    # cut on the device: the host would copy what it cuts
    embeds_BTD = embeds_BTD.to(device, non_blocking=True)[:, :width]
    is_needed = not bool(mask_BT.all())
    return embeds_BTD, mask_BT.to(device, non_blocking=True) if is_needed else None


def _grid(sampling: Sampling) -> tuple[int, int]:
    return sampling.height // PIXELS_PER_TOKEN, sampling.width // PIXELS_PER_TOKEN
