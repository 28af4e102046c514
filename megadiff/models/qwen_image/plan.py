"""Give the rules by which Qwen-Image's weights are sharded and loaded. Data only."""

from __future__ import annotations

from megadiff.models.served_names import ServedName
from megadiff.parallel.plan import ParallelPlan, Rule

PLAN = ParallelPlan(
    rules=(
        Rule("img_in", "replicated"),
        Rule("txt_norm", "replicated"),
        Rule("txt_in", "replicated"),
        Rule("time_text_embed.*", "replicated"),
        Rule("transformer_blocks.*_mod.1", "modulation"),  # a third of all weights
        Rule("transformer_blocks.*.attn.norm_*", "head_norm"),
        Rule("transformer_blocks.*.attn.to_[qkv]", "column"),
        Rule("transformer_blocks.*.attn.add_[qkv]_proj", "column"),
        Rule("transformer_blocks.*.attn.to_out.0", "row"),
        Rule("transformer_blocks.*.attn.to_add_out", "row"),
        Rule("transformer_blocks.*_mlp.net.0.proj", "column"),
        Rule("transformer_blocks.*_mlp.net.2", "row"),
        Rule("norm_out.linear", "replicated"),
        Rule("proj_out", "replicated"),
    ),
    # after the last block's attention the text stream leads nowhere
    unused=("transformer_blocks.{last}.attn.to_add_out", "transformer_blocks.{last}.txt_mlp.*"),
    lora_targets=(
        "transformer_blocks.*.attn.to_[qkv]",
        "transformer_blocks.*.attn.add_[qkv]_proj",
        "transformer_blocks.*.attn.to_out.0",
        "transformer_blocks.*.attn.to_add_out",
        "transformer_blocks.*_mlp.net.0.proj",
        "transformer_blocks.*_mlp.net.2",
    ),
)

SERVED_NAMES = (
    ServedName(diffusers="attn.to_q", served="attn.to_qkv", shard=0, num_shards=3),
    ServedName(diffusers="attn.to_k", served="attn.to_qkv", shard=1, num_shards=3),
    ServedName(diffusers="attn.to_v", served="attn.to_qkv", shard=2, num_shards=3),
    ServedName(diffusers="attn.add_q_proj", served="attn.add_kv_proj", shard=0, num_shards=3),
    ServedName(diffusers="attn.add_k_proj", served="attn.add_kv_proj", shard=1, num_shards=3),
    ServedName(diffusers="attn.add_v_proj", served="attn.add_kv_proj", shard=2, num_shards=3),
    ServedName(diffusers="attn.to_out.0", served="attn.to_out"),
)
