"""Define what trainer and replica need to know of a model family, with what families have alike.

One class per family inherits it, next to the family's rollout pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megadiff.models.conditioning import Conditioning
from megadiff.models.decoding import Decoding, TokenCount
from megadiff.models.packing import TokenGrid, unpack
from megadiff.models.pipeline_folder import Index, pipeline_problems, weighted_components
from megadiff.models.served_names import ServedNames
from megadiff.models.vae import decode_latents, encode_images
from megadiff.parallel.plan import ParallelPlan
from megadiff.tensors.model_files import read_json
from megadiff.types import Prompt, Sampling, Tensors

if TYPE_CHECKING:  # needs megatron-core, which only its engine does
    from megadiff.parallel.attention import TokenAttention, TokenAxes

# image and text, as diffusers' modules name them
STREAMS = ("hidden_states", "encoder_hidden_states")
# given images of one prompt, each uint8 RGB [H, W, 3]
Images = tuple[Tensor, ...]
# uint8 RGB [B, H, W, 3] → packed, normalised latents [B, L, C] float32;
# a video model's takes [B, F, H, W, 3] too
ImageEncoder = Callable[[Tensor], Tensor]


class PromptEncoder(Protocol):
    """Encode texts as the replica does."""

    def __call__(self, texts: Sequence[str], images: Sequence[Images] = ()) -> Tensors:
        """Return a conditioning by name, each tensor [B, …] on the CPU.

        images: those of each text, for a model whose text encoder sees them.
        Masks are named as models/conditioning.py says; a group's record is cut to its own length.
        """


class ModelAdapter(Protocol):
    """Know one model family's packing, conditioning, timestep unit, guidance and schedule.

    It holds no weights. Everything outside has latents as [B, L, C]: L tokens of C channels, a
    video's frames following each other. Only velocity() and the encoders know the model's own
    shape of them.

    title: what people call the models. pipeline_class: `_class_name` in model_index.json.
    published: model → the GPUs on which it trained at full size, or "", for README's table.
    rollout_pipeline: "module:Class" of the replica's side, imported there only.
    size_keys: of layers, heads and their width in the transformer's config.json. text_width_key: of
    the width of encoded texts there.
    model_folder: the diffusers pipeline folder.
    components: its subfolders that are trained, e.g. ("transformer",). Several are of one shape,
    so that one plan, num_heads and width hold for all. Each has a part of the schedule
    (component_of).
    num_heads: attention heads, which tensor parallelism and Ulysses split.
    width: channels of a token inside the transformer. mlp_ratio: its MLPs' width over that.
    plan: how a transformer is sharded. decoding: how many samples the VAE decodes at once.
    frames_per_s: at which its videos are played. max_prompt_tokens: longer texts are refused.
    transformer_class, vae_class: their names in diffusers. tokenizer_class: in transformers.
    tokenizer_folder: of the tokenizer that counts a prompt's tokens.
    stage_topology, stage_class: vllm-omni's names of the model in one stage and of its class, where
    it knows the model in several stages too.
    num_end_marks: tokens of a conditioning that stay behind all text, the model's own included.
    needs_images: whether every prompt must give an image. needs_plain_image: whether vllm-omni
    refuses all requests without one.
    supervised_obstacle: why captioned images cannot train the model; "" where they can.
    served_names: how vllm-omni packs the weights (models/served_names.py). None: replicas do not
    map a trainer's base.
    veomni_splits_tokens: whether VeOmni's own class of this model is right under Ulysses, for every
    length. Else its engine takes the stock module and parallel.tokens.
    """

    title: ClassVar[str]
    published: ClassVar[Mapping[str, str]] = {}
    pipeline_class: ClassVar[str]
    rollout_pipeline: ClassVar[str]
    size_keys: ClassVar[tuple[str, ...]] = (
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
    )
    text_width_key: ClassVar[str] = "joint_attention_dim"
    model_folder: Path
    components: tuple[str, ...]
    num_heads: int
    width: int
    mlp_ratio: float
    plan: ParallelPlan
    decoding: Decoding
    frames_per_s: int
    max_prompt_tokens: int
    stage_topology: ClassVar[str] = ""
    stage_class: ClassVar[str] = ""
    num_end_marks: ClassVar[int] = 0
    needs_images: ClassVar[bool] = False
    needs_plain_image: ClassVar[bool] = False
    supervised_obstacle: ClassVar[str] = ""
    served_names: ClassVar[ServedNames | None] = None
    veomni_splits_tokens: bool
    transformer_class: str
    vae_class: str
    tokenizer_class: str
    tokenizer_folder: str = "tokenizer"

    def __init__(self, model_folder: Path | str) -> None:
        """Read the sizes from a model folder. Raises ValueError where it lacks one."""

    def __hash__(self) -> int:
        # By identity, as any object's: what the planner measures is kept by adapter.
        return object.__hash__(self)

    @classmethod
    def recognises(cls, folder: Path, index: Index) -> bool:
        """Tell whether a model folder is of this family. index: of its model_index.json."""
        return index.get("_class_name") == cls.pipeline_class

    @classmethod
    def folder_problems(cls, folder: Path, index: Index) -> Iterator[str]:
        """Yield what the folder lacks or has damaged. Headers alone are read."""
        return pipeline_problems(folder, index)

    @classmethod
    def component_configs(cls, folder: Path, index: Index) -> dict[str, Path]:
        """Return component → the file with the sizes of its transformer."""
        components = ["transformer"]
        for name, (_, class_name) in weighted_components(index).items():
            if class_name == cls.transformer_class and name not in components:
                components.append(name)
        return {name: folder / name / "config.json" for name in components}

    def root_networks(self) -> dict[str, int]:
        """Return name → parameters of networks beside the transformer that no component has.

        By default none: model_index.json lists a folder for each.
        """
        return {}

    @classmethod
    def module_class(cls) -> Any:
        """Return the stock transformer's class."""
        import diffusers

        return getattr(diffusers, cls.transformer_class)

    def component_of(self, sigma: float) -> str:
        """Return the component that gives the velocity at sigma, in rollout and in training.

        sigma: of the schedule, in [0, 1].
        """

    def empty_transformer(self, component: str = "transformer") -> nn.Module:
        """Return the stock diffusers transformer with its weights on the meta device.

        Buffers are real.
        """
        from accelerate import init_empty_weights

        stock = self.module_class()
        # include_buffers is false by default: buffers that no file holds get their values here
        with init_empty_weights():
            return stock.from_config(stock.load_config(self.model_folder / component))

    def attention(self, tokens: TokenAxes) -> TokenAttention:
        """Return the processor of attention sites for tokens and heads split over ranks."""

    def adapt_veomni_module(self, transformer: nn.Module) -> None:
        """Make VeOmni's own class of this model fast to compile, in place; by default nothing."""

    def adapt_vae(self, vae: nn.Module) -> None:
        """Make the family's VAE fast, in place; by default nothing."""

    def compile_vae(self, vae: nn.Module) -> None:
        """Compile the decoder of a replica's VAE, in place; by default nothing."""

    def keep_streams_in_float32(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        """Make blocks add to float32 streams, in place, in the trainer's class or the replica's.

        Matrix products stay in dtype; the velocity is float32.
        """

    def check_float32_streams(self) -> None:
        """Raise ValueError where the family's streams cannot be kept in float32.

        By default they can.
        """

    def validate(self, sampling: Sampling) -> None:
        """Raise ValueError for a size, guidance or given images that the model cannot sample."""

    def check_trained(self) -> None:
        """Raise ValueError for a model that is not to be trained; by default any may be."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for the first prompt that has more tokens than the model takes."""
        texts = dict.fromkeys(
            text for prompt in prompts for text in (prompt.text, prompt.negative_text)
        )
        # most texts fit by their bytes, without the tokenizer, which takes seconds to load
        long = [text for text in texts if len(text.encode()) + 2 > self.max_prompt_tokens]
        if not long:
            return

        import transformers

        tokenizer = getattr(transformers, self.tokenizer_class).from_pretrained(
            self.model_folder / self.tokenizer_folder
        )

        for text in long:
            count = self.num_prompt_tokens(text, tokenizer)
            if count > self.max_prompt_tokens:
                raise ValueError(
                    f"a prompt has {count} tokens ({len(text)} characters), the model takes "
                    f"{self.max_prompt_tokens} and would cut off the rest; "
                    f"shorten {text[:60]!r}…"
                )

    def num_prompt_tokens(self, text: str, tokenizer: Any) -> int:
        """Count a prompt's tokens; 0 where its bytes show that it fits."""
        # a token is at least one byte, the marks of start and end apart
        fits = len(text.encode()) + 2 <= self.max_prompt_tokens
        return 0 if fits else len(tokenizer(text).input_ids)

    def grid(self, sampling: Sampling) -> TokenGrid:
        """Return the tokens of a whole image or video, given frames among them."""

    def latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        """Return (L, C), packed latent tokens and channels, of what is drawn of one sample.

        The tokens of given images, which the transformer sees as well, are not counted.
        """

    def image_size(self, height: int, width: int, sampling: Sampling) -> tuple[int, int]:
        """Return the (height, width) to which a given image is scaled; by default its own.

        validate() has the last word on it.
        """
        return height, width

    def image_latents(
        self, encode: ImageEncoder, images: Sequence[Tensor], sampling: Sampling
    ) -> Tensor:
        """Return a request's given images as the conditioning `image_latents` [1, tokens, C].

        images: uint8 [H, W, 3] each. encode: of the image_encoder, or a replica's.
        """
        # one at a time: their sizes differ, and the VAE's activations are large
        return torch.cat([encode(image_HWC[None]) for image_HWC in images], dim=1)

    def image_latents_shape(self, sampling: Sampling) -> tuple[int, int]:
        """Return (tokens, channels) of image_latents()."""
        num_drawn, channels = self.latents_shape(sampling)
        return self.token_count(sampling, 0).image - num_drawn, channels

    def schedule(self, sampling: Sampling) -> Tensor:
        """Return [T+1] float32 sigmas from 1 to 0, by the checkpoint's own scheduler config."""

    def shift(self, sigmas: Tensor, sampling: Sampling) -> Tensor:
        """Shift sigmas in (0, 1], drawn without regard to size, as the model's schedule is."""

    def num_passes(self, component: str, sampling: Sampling) -> int:
        """Return the forward passes of one velocity: 2 where guidance needs a negative prompt."""

    def is_guided(self, sampling: Sampling) -> bool:
        """Tell whether any component needs the negative prompt."""
        return any(self.num_passes(component, sampling) > 1 for component in self.components)

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
        """Return the guided velocity [B, L, C] float32 at sigma_B, with gradient if that is on.

        transformer: the component's, which is component_of(sigma) for every row: rows of two
        components never have a call in common.
        component: decides the guidance scale. The caller gives it, as reading it off sigma_B would
        wait for the device.
        """

    def encode(self, pipeline: Any, texts: Sequence[str], images: Sequence[Images]) -> Tensors:
        """Return what a PromptEncoder does, by the networks of a pipeline.

        pipeline: of diffusers in the trainer, of vllm-omni in a replica.
        """

    def prompt_encoder(
        self, *, dtype: torch.dtype, device: torch.device
    ) -> AbstractContextManager[PromptEncoder]:
        """Load the text encoder (5.7 to 7 B parameters); its memory is freed at the end.

        It returns embeddings in dtype.
        """

    def blank_text(self, num_tokens: int) -> Tensors:
        """Return zeros in place of one encoded text, [1, …] by name: for plans and benchmarks."""
        config = read_json(self.model_folder / self.components[0] / "config.json")
        width = config[self.text_width_key]
        return {
            "prompt_embeds": torch.zeros(1, num_tokens, width),
            "prompt_mask": torch.ones(1, num_tokens, dtype=torch.bool),
        }

    def num_text_tokens(self, conditioning: Conditioning) -> int:
        """Return the width of encoded prompts, padding included."""
        return conditioning["prompt_mask"].shape[1]

    @contextmanager
    def image_encoder(
        self, *, dtype: torch.dtype, device: torch.device | str
    ) -> Iterator[ImageEncoder]:
        """Load the encoder of trained latents and given images; freed at the end.

        dtype: of the encoder's weights. Latents stay on the device.
        """
        import diffusers

        stock = getattr(diffusers, self.vae_class)
        vae = stock.from_pretrained(self.model_folder / "vae", torch_dtype=dtype).to(device)
        self.adapt_vae(vae)
        with freed(vae):
            yield partial(encode_images, vae)

    def decode(
        self, vae: Any, latents_NLC: Tensor, sampling: Sampling, conditioning: Conditioning
    ) -> Tensor:
        """Decode latents at sigma 0 to uint8 RGB [N, F, H, W, 3] on the CPU, a few rows at a time.

        conditioning: of each row, for a model whose given images are part of the result.
        """
        num_rows = self.decoding.num_rows(
            latents_NLC.device.type,
            num_frames=sampling.num_frames,
            height=sampling.height,
            width=sampling.width,
        )
        return decode_latents(vae, unpack(latents_NLC, self.grid(sampling)), num_rows=num_rows)

    def token_count(self, sampling: Sampling, num_text_tokens: int) -> TokenCount:
        """Count the tokens of one forward. num_text_tokens: of the longest prompt."""

    def flops(self, sampling: Sampling, num_text_tokens: int) -> float:
        """Return the floating point operations of one velocity of one sample.

        Two passes where guidance needs them. With several components the mean over the schedule.
        """


@contextmanager
def freed(module: nn.Module) -> Iterator[None]:
    """Free the module's memory at the end of the context."""
    try:
        yield
    finally:
        # not `del`: the caller's name for the encoder may outlive the context
        module.to("meta")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
