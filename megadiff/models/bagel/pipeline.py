"""Run BAGEL inside vllm-omni, in its one stage: text, images and thinking by one model.

Loaded by the replica under its dotted name. Tested with vllm-omni 0.28. The stock `forward` takes
one prompt and one image a request, and its guidance has one norm for the whole call. So our
requests are drawn here, by vllm-omni's modules and the trainer's own velocity function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.models.bagel import bagel_transformer, pipeline_bagel
from vllm_omni.diffusion.models.bagel.bagel_transformer import NaiveCache

from megadiff.diffusion.noise import group_key, seed_of
from megadiff.models.adapter import Images
from megadiff.models.bagel.adapter import BagelAdapter, encode_texts, with_image_marks
from megadiff.models.bagel.attention import NUM_MARKS
from megadiff.models.bagel.plan import served_names
from megadiff.models.pipeline_base import RolloutPipelineMixin, TransformerCall
from megadiff.tensors.model_files import GENERATION_CORE, LANGUAGE_MODEL, read_json
from megadiff.types import RolloutRequest, Tensors

VAE_SIZES = ("ch", "ch_mult", "num_res_blocks")  # in config.json of models that are not published
PUBLISHED_VAE = pipeline_bagel.default_ae_params()


class BagelRolloutPipeline(RolloutPipelineMixin, pipeline_bagel.BagelPipeline):
    adapter: BagelAdapter
    prepares_ahead = False  # encode() drops what the call that is drawn still needs

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        compute_in(od_config.dtype, Path(od_config.model))
        super().__init__(od_config=od_config, prefix=prefix)
        sizes = self.adapter.sizes
        self.served_names = served_names(sizes.num_heads, sizes.num_kv_heads)
        self._prefills: dict[tuple[int, ...], NaiveCache] = {}

    def policy_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the trainer's names; vllm-omni has two modules for one transformer.

        The text's last norm stays outside: no image depends on it.
        """
        for name, parameter in self.named_parameters():
            inner = name.removeprefix(LANGUAGE_MODEL)
            core = name.removeprefix("bagel.")
            if inner != name and inner != "norm.weight":
                name = f"transformer.{inner}"
            elif core.startswith(GENERATION_CORE):
                name = f"transformer.{core}"
            yield name, parameter

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Load a checkpoint's tensors, or pushed ones under the trainer's names."""
        return super().load_weights((_stored_name(name), tensor) for name, tensor in weights)

    def forward(self, req: Any) -> Any:
        try:
            return super().forward(req)
        finally:
            # a text's keys and values take 57 KB a token, on a GPU that the trainer needs next
            self._prefills = {}

    def encode(self, texts: Sequence[str], images: Sequence[Images] = ()) -> Tensors:
        return encode_texts(self.tokenizer, texts)

    def think(self, requests: Sequence[RolloutRequest]) -> tuple[Tensors, list[str]]:
        """Let the model write about each prompt; a group's samples share one text."""
        rows = []
        texts = []
        for request in requests:
            encoded = encode_texts(self.tokenizer, [request.prompt.text])
            prompt = encoded["prompt_ids"][0, :-NUM_MARKS].tolist()
            written = self._written(prompt, request)
            rows.append(prompt + written)
            # the first is the mark that a text begins with
            texts.append(self.tokenizer.decode(written[1:]))
        return with_image_marks(self.tokenizer, rows), texts

    def _written(self, ids: list[int], request: RolloutRequest) -> list[int]:
        """Sample what follows the prompt. A group's text is the same in any call."""
        key = group_key(seed=request.seed, step=request.step, prompt_id=request.prompt.id)
        sampling = request.sampling
        start = self.bagel.prepare_start_tokens([len(ids)], [len(ids)], self.new_token_ids)
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            _autocast(self.device.type, dtype=self.od_config.dtype),
        ):
            torch.manual_seed(seed_of(f"{key}/think"))
            written_TB = self.bagel.generate_text(
                past_key_values=self._prefill(tuple(ids)),
                max_length=sampling.think_tokens,
                do_sample=sampling.think_temperature > 0,
                temperature=sampling.think_temperature or 1.0,
                end_token_id=self.new_token_ids["eos_token_id"],
                **{name: tensor.to(self.device) for name, tensor in start.items()},
            )
        # the text went on in the prompt's own keys and values
        self._prefills = {}
        return written_TB[:, 0].tolist()

    def transformer_call(self, component: str) -> TransformerCall:
        """Return what takes the arguments of the trainer's module."""
        return TransformerCall(forward=self._velocity, dtype=self.od_config.dtype)

    def _velocity(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        context_ids: Tensor,
        prompt_mask: Tensor,
        position_ids: Tensor,
    ) -> tuple[Tensor]:
        """Return the velocity [B, L, C], as megadiff.models.bagel.transformer does.

        A row's tokens are packed as mark, latents, mark; rows follow each other.
        """
        bagel = self.bagel
        lengths_B = prompt_mask.sum(dim=1)
        rows = [row[:length] for row, length in zip(context_ids.tolist(), lengths_B.tolist())]
        with _autocast(self.device.type, dtype=self.od_config.dtype):
            caches = [self._prefill(tuple(row)) for row in rows]
            marks_BSD = self.transformer.embed_tokens(context_ids[:, -2:])
            latents_BLD = bagel.vae2llm(hidden_states) + bagel.time_embedder(timestep)[:, None]
            latents_BLD = latents_BLD + bagel.latent_pos_embed(position_ids)
            packed_BSD = torch.cat(
                [marks_BSD[:, :1], latents_BLD.to(marks_BSD), marks_BSD[:, 1:]], dim=1
            )

            num_rows, length, _ = packed_BSD.shape
            index_BS = torch.arange(num_rows * length, device=self.device).view(num_rows, length)
            output = self.language_model(
                packed_query_sequence=packed_BSD.flatten(0, 1),
                query_lens=lengths_B.new_full((num_rows,), length),
                # each row's own text, never the padded one
                packed_query_position_ids=lengths_B.repeat_interleave(length),
                past_key_values=NaiveCache.merge(caches),
                update_past_key_values=False,
                is_causal=False,
                mode="gen",
                packed_vae_token_indexes=index_BS[:, 1:-1].flatten(),
                packed_text_indexes=index_BS[:, [0, -1]].flatten(),
            )
            velocity_BSC = bagel.llm2vae(output.packed_query_sequence).unflatten(0, index_BS.shape)
        return (velocity_BSC[:, 1:-1],)

    def _prefill(self, ids: tuple[int, ...]) -> NaiveCache:
        """Return the keys and values of a text, computed once a call; none of an empty one."""
        if ids not in self._prefills:
            cache = NaiveCache(self.transformer.config.num_hidden_layers)
            if ids:
                cache = self.bagel.forward_cache_update_text(
                    cache,
                    packed_text_ids=torch.tensor(ids, device=self.device),
                    packed_text_position_ids=torch.arange(len(ids), device=self.device),
                    text_token_lens=torch.tensor([len(ids)], device=self.device),
                )
            self._prefills[ids] = cache
        return self._prefills[ids]


def compute_in(dtype: torch.dtype, model: Path) -> None:
    """Make vllm-omni's BAGEL compute in dtype, and with an autoencoder of the model's own sizes."""
    # Its layers cast to bfloat16 by name.
    in_float32 = SimpleNamespace(**vars(torch) | {"bfloat16": torch.float32})
    bagel_transformer.torch = in_float32 if dtype == torch.float32 else torch
    # On a CPU its autocast is off, so that bfloat16 weights meet float32 latents.
    pipeline_bagel.torch = SimpleNamespace(**vars(torch) | {"autocast": _autocast})

    sizes = read_json(model / "config.json").get("vae_config") or {}
    given = {name: sizes[name] for name in VAE_SIZES if name in sizes}
    pipeline_bagel.default_ae_params = lambda: replace(PUBLISHED_VAE, **given)


def _autocast(device_type: str, *, dtype: torch.dtype, enabled: bool = True) -> torch.autocast:
    return torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32)


def _stored_name(name: str) -> str:
    """Return a pushed tensor's name as ema.safetensors has it; others stay."""
    inner = name.removeprefix("transformer.")
    is_own = inner == name or inner.startswith(GENERATION_CORE)
    return inner if is_own else LANGUAGE_MODEL + inner
