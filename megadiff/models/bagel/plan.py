"""Give the rules by which BAGEL's weights are sharded, trained and served. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megadiff.models.served_names import ServedNames
from megadiff.parallel.plan import ParallelPlan

PLAN = ParallelPlan(
    rules={
        "embed_tokens": "replicated",
        "time_embedder.*": "replicated",
        "vae2llm": "replicated",
        "llm2vae": "replicated",
        "latent_pos_embed": "replicated",
        "norm_moe_gen": "replicated",
        "layers.*layernorm": "replicated",
        "layers.*layernorm_moe_gen": "replicated",
        "layers.*.self_attn.[qk]_norm*": "head_norm",
        "layers.*.self_attn.[qkv]_proj*": "column",
        "layers.*.self_attn.o_proj*": "row",
        "layers.*.mlp*.gate_proj": "column",
        "layers.*.mlp*.up_proj": "column",
        "layers.*.mlp*.down_proj": "row",
    },
    blocks="layers.*",
    attention="layers.*.self_attn",
    token_inputs=("hidden_states", "context_ids", "position_ids"),
    features=("hidden_states",),
    # all but the generation expert; text never depends on a trained weight
    frozen=(
        "embed_tokens",
        "time_embedder.*",
        "vae2llm",
        "llm2vae",
        "latent_pos_embed",
        "layers.*layernorm",
        "layers.*.self_attn.[qkvo]_proj",
        "layers.*.self_attn.[qk]_norm",
        "layers.*.mlp.*",
    ),
    # vllm-omni computes attention's two experts in one layer, which takes no LoRA
    lora_targets=("layers.*.mlp_moe_gen.*",),
)


def served_names(*, num_heads: int, num_kv_heads: int) -> ServedNames:
    """Return how vllm-omni packs the weights: both experts' in one layer, keys with fewer heads."""
    names: dict[str, Sequence[str] | Mapping[str, int]] = {
        "self_attn.o_proj.gen_exp": ("self_attn.o_proj_moe_gen",),
        "norm.gen_weight": ("norm_moe_gen.weight",),
    }
    for served, expert in (("self_attn.qkv_proj", ""), ("self_attn.qkv_proj.gen_exp", "_moe_gen")):
        names[served] = {
            f"self_attn.q_proj{expert}": num_heads,
            f"self_attn.k_proj{expert}": num_kv_heads,
            f"self_attn.v_proj{expert}": num_kv_heads,
        }
    for mlp in ("mlp", "mlp_moe_gen"):
        names[f"{mlp}.gate_up_proj"] = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    for norm in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"):
        names[f"{norm}.gen_weight"] = (f"{norm}_moe_gen.weight",)
    return names
