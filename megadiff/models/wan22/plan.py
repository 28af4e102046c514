"""Give the rules by which Wan2.2's weights, of either expert, are sharded and loaded. Data only."""

from __future__ import annotations

from megadiff.models.served_names import ServedName
from megadiff.parallel.plan import ParallelPlan, Rule

PLAN = ParallelPlan(
    rules=(
        Rule("patch_embedding", "replicated"),
        Rule("condition_embedder.*", "replicated"),
        # one a block and one at the end: parameters, not layers
        Rule("*scale_shift_table", "replicated"),
        Rule("blocks.*.norm2", "replicated"),
        Rule("blocks.*.attn[12].norm_[qk]", "across_heads_norm"),
        Rule("blocks.*.attn[12].to_[qkv]", "column"),
        Rule("blocks.*.attn[12].to_out.0", "row"),
        Rule("blocks.*.ffn.net.0.proj", "column"),
        Rule("blocks.*.ffn.net.2", "row"),
        Rule("proj_out", "replicated"),
    ),
    blocks="blocks.*",
    attention="blocks.*.attn[12]",
    token_inputs=("timestep",),  # of single tokens, where the first frame is given
    stream_entry="blocks.0",
    stream_exit="proj_out",
    lora_targets=(
        "blocks.*.attn[12].to_[qkv]",
        "blocks.*.attn[12].to_out.0",
        "blocks.*.ffn.net.0.proj",
        "blocks.*.ffn.net.2",
    ),
)

SERVED_NAMES = (
    ServedName(diffusers="attn1.to_q", served="attn1.to_qkv", shard=0, num_shards=3),
    ServedName(diffusers="attn1.to_k", served="attn1.to_qkv", shard=1, num_shards=3),
    ServedName(diffusers="attn1.to_v", served="attn1.to_qkv", shard=2, num_shards=3),
    ServedName(diffusers="attn1.to_out.0", served="attn1.to_out"),
    ServedName(diffusers="attn2.to_out.0", served="attn2.to_out"),
    ServedName(diffusers="ffn.net.0.proj", served="ffn.net_0.proj"),
    ServedName(diffusers="ffn.net.2", served="ffn.net_2"),
    # its table is the transformer's own
    ServedName(diffusers="", served="output_scale_shift_prepare"),
)
