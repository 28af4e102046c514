"""Give the rules by which Stable Diffusion 3's weights are sharded and loaded. Data only."""

from __future__ import annotations

from megadiff.parallel.plan import ParallelPlan

# attn2 is the image's attention to itself alone, in some blocks of SD3.5-medium
PLAN = ParallelPlan(
    rules={
        "pos_embed.proj": "replicated",
        "time_text_embed.*": "replicated",
        "context_embedder": "replicated",
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm1_context.linear": "modulation",
        "transformer_blocks.*.attn*.norm_*": "head_norm",
        "transformer_blocks.*.attn*.to_[qkv]": "column",
        "transformer_blocks.*.attn.add_[qkv]_proj": "column",
        "transformer_blocks.*.attn*.to_out.0": "row",
        "transformer_blocks.*.attn.to_add_out": "row",
        "transformer_blocks.*.ff*.net.0.proj": "column",
        "transformer_blocks.*.ff*.net.2": "row",
        "norm_out.linear": "replicated",
        "proj_out": "replicated",
    },
    attention="transformer_blocks.*.attn*",
    token_inputs=("encoder_hidden_states",),
    # forward makes tokens of [B, C, H, W] itself
    stream_entry="transformer_blocks.0",
    stream_exit="proj_out",
    features=("hidden_states", "encoder_hidden_states", "pooled_projections"),
    constants=("pos_embed.pos_embed",),
    # SD3-medium has no such norms
    optional=("transformer_blocks.*.attn*.norm_*",),
    lora_targets=(
        "transformer_blocks.*.attn*.to_[qkv]",
        "transformer_blocks.*.attn.add_[qkv]_proj",
        "transformer_blocks.*.attn*.to_out.0",
        "transformer_blocks.*.attn.to_add_out",
        "transformer_blocks.*.ff*.net.0.proj",
        "transformer_blocks.*.ff*.net.2",
    ),
)

SERVED_NAMES = {
    "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn2.to_qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "attn.add_kv_proj": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
