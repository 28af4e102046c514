"""What the trainer needs to know of a model family. One class per family, next to its rollout pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from megadiff.models.decoding import Decoding, TokenCount
from megadiff.parallel.plan import ParallelPlan
from megadiff.types import Prompt, Sampling

if TYPE_CHECKING:  # needs megatron-core, which only its engine does
    from megadiff.parallel.attention import TokenAttention, TokenAxes

Conditioning = Mapping[str, Tensor]
STREAMS = (
    "hidden_states",
    "encoder_hidden_states",
)  # image and text, as diffusers' modules name them
FIRST_FRAME = "first_frame"  # in a conditioning: clean latents [B, tokens of a frame, C], where Sampling.first_frame
PromptEncoder = Callable[
    [Sequence[str]], tuple[Tensor, Tensor]
]  # texts → what encode_prompt returns
# uint8 RGB [B, H, W, 3], of a video model [B, F, H, W, 3] too → packed, normalised latents [B, L, C] float32
ImageEncoder = Callable[[Tensor], Tensor]


class ModelAdapter(Protocol):
    """Packing, conditioning, timestep unit, guidance and schedule of one model family. Holds no weights.

    Everything outside has latents as [B, L, C]: L tokens, the transformer's own where that is one stream, of C channels; a
    video's frames follow each other. Only velocity() and the encoders know the model's shape of them.

    model_folder: the diffusers pipeline folder. components: its subfolders that are trained, e.g. ("transformer",);
    several are of one shape, each in charge of a part of the schedule (component_of), so that one plan, num_heads
    and width hold for all. num_heads: attention heads, which tensor parallelism and Ulysses split. width: channels of a
    token inside the transformer; mlp_ratio: times that, of its MLPs. plan: how a transformer is sharded.
    decoding: how many samples the VAE decodes at once. frames_per_s: at which its videos are played.
    veomni_splits_tokens: whether VeOmni's own class of this model is right under Ulysses, for every length; else its engine
    takes the stock module and parallel.tokens.
    """

    model_folder: Path
    components: tuple[str, ...]
    num_heads: int
    width: int
    mlp_ratio: float
    plan: ParallelPlan
    decoding: Decoding
    frames_per_s: int
    veomni_splits_tokens: bool

    def component_of(self, sigma: float) -> str:
        """The component that gives the velocity at sigma, in rollout and in training; sigma: of the schedule, in [0, 1]."""

    def empty_transformer(self, component: str = "transformer") -> nn.Module:
        """The stock diffusers transformer with its weights on the meta device; what is no weight is real."""

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        """The processor of the plan's attention sites when tokens and heads are split over ranks."""

    def adapt_veomni_module(self, transformer: nn.Module) -> None:
        """In place, what makes VeOmni's own class of this model fast to compile. Called where it is trained."""

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        """In place, in the trainer's class and in the replica's: blocks, whose matrix products stay in dtype, add to streams
        in float32, and the velocity is float32."""

    def check_float32_streams(self) -> None:
        """Raises ValueError where the family's streams cannot be kept in float32."""

    def validate(self, sampling: Sampling) -> None:
        """Raises ValueError when the model cannot sample at this size or guidance, or from a given first frame."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError for the first prompt that has more tokens than the model takes."""

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        """(L, C): packed latent tokens and channels of what is drawn of one sample: without those of a given first frame,
        which the transformer sees as well."""

    def schedule(self, sampling: Sampling) -> Tensor:
        """[T+1] float32 sigmas from 1 to 0, by the checkpoint's own scheduler config."""

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        """Sigmas in (0, 1], drawn without regard to size, shifted as the model's schedule is; the same shape."""

    def num_passes(self, component: str, sampling: Sampling) -> int:
        """Forward passes of one velocity: 2 where guidance needs the negative prompt as well, else 1."""

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
        """Guided velocity [B, L, C] float32 at sigma_B, with gradient where the caller has it on.

        transformer: the component's, which is component_of(sigma) for every row: rows of two components never share a call.
        component: decides the guidance scale. It is told, as to find it in sigma_B would wait for the device.
        """

    def encode_prompt(
        self, texts: Sequence[str], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """(embeddings [B, tokens, D], mask [B, tokens] bool), as the replica computes them. Loads the text encoder."""

    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device
    ) -> AbstractContextManager[PromptEncoder]:
        """encode_prompt for many calls: the text encoder is loaded once, and its memory freed at the end."""

    def image_encoder(
        self, *, dtype: torch.dtype, device: torch.device
    ) -> AbstractContextManager[ImageEncoder]:
        """What trained latents and given first frames are made by; dtype: of the image encoder's weights. Loaded and freed
        as above."""

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """Of one forward. num_text_tokens: of the longest prompt."""

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Floating point operations of one forward pass of one sample at one step; two passes where guidance needs them. Of
        several components the mean over the schedule's steps."""
