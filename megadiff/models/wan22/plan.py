"""Give the rules by which Wan2.2's weights, of either expert, are sharded and loaded. Data only."""

from __future__ import annotations

from megadiff.parallel.plan import ParallelPlan

PLAN = ParallelPlan(
    rules={
        "patch_embedding": "replicated",
        "condition_embedder.*": "replicated",
        # one a block and one at the end: parameters, not layers
        "*scale_shift_table": "replicated",
        "blocks.*.norm2": "replicated",
        "blocks.*.attn[12].norm_[qk]": "across_heads_norm",
        "blocks.*.attn[12].to_[qkv]": "column",
        "blocks.*.attn[12].to_out.0": "row",
        "blocks.*.ffn.net.0.proj": "column",
        "blocks.*.ffn.net.2": "row",
        "proj_out": "replicated",
    },
    blocks="blocks.*",
    attention="blocks.*.attn[12]",
    token_inputs=("timestep",),  # of single tokens, where an image is given
    stream_entry="blocks.0",
    stream_exit="proj_out",
    lora_targets=(
        "blocks.*.attn[12].to_[qkv]",
        "blocks.*.attn[12].to_out.0",
        "blocks.*.ffn.net.0.proj",
        "blocks.*.ffn.net.2",
    ),
)

SERVED_NAMES = {
    "attn1.to_qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn1.to_out": ("attn1.to_out.0",),
    "attn2.to_out": ("attn2.to_out.0",),
    "ffn.net_0.proj": ("ffn.net.0.proj",),
    "ffn.net_2": ("ffn.net.2",),
    "output_scale_shift_prepare": ("",),  # its table is the transformer's own
}
