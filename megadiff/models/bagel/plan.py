"""Give the rules by which BAGEL's weights are sharded, trained and loaded. Data only."""

from __future__ import annotations

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
    # where the last layer's context leads: nowhere
    lora_targets=("layers.*.mlp_moe_gen.*",),
)

SERVED_NAMES = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.qkv_proj.gen_exp": (
        "self_attn.q_proj_moe_gen",
        "self_attn.k_proj_moe_gen",
        "self_attn.v_proj_moe_gen",
    ),
    "self_attn.o_proj.gen_exp": ("self_attn.o_proj_moe_gen",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_moe_gen.gate_up_proj": ("mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj"),
}
