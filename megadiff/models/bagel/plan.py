"""Give the rules by which BAGEL's weights are sharded, trained and loaded. Data only."""

from __future__ import annotations

from collections.abc import Sequence

from megadiff.models.served_names import Segments, ServedNames
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

# norms that vllm-omni keeps both experts' weights in
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")


def served_names(num_heads: int, num_kv_heads: int) -> ServedNames:
    """Return where vllm-omni has each weight. Keys and values have fewer heads than queries."""
    parts = (num_heads, num_kv_heads, num_kv_heads)
    names: dict[str, Sequence[str] | Segments] = {
        f"{norm}.gen_weight": (f"{norm}_moe_gen.weight",) for norm in NORMS
    }
    for served, expert in (("qkv_proj", ""), ("qkv_proj.gen_exp", "_moe_gen")):
        names[f"self_attn.{served}"] = Segments(
            names=tuple(f"self_attn.{name}_proj{expert}" for name in "qkv"), parts=parts
        )
    names["self_attn.o_proj.gen_exp"] = ("self_attn.o_proj_moe_gen",)
    for mlp in ("mlp", "mlp_moe_gen"):
        names[f"{mlp}.gate_up_proj"] = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    return names
