"""Qwen-Image's weights: what a loader of them must know. Data only."""

from __future__ import annotations

from megadiff.models.served_names import ServedName

SERVED_NAMES = (
    ServedName(diffusers="attn.to_q", served="attn.to_qkv", shard=0, num_shards=3),
    ServedName(diffusers="attn.to_k", served="attn.to_qkv", shard=1, num_shards=3),
    ServedName(diffusers="attn.to_v", served="attn.to_qkv", shard=2, num_shards=3),
    ServedName(diffusers="attn.add_q_proj", served="attn.add_kv_proj", shard=0, num_shards=3),
    ServedName(diffusers="attn.add_k_proj", served="attn.add_kv_proj", shard=1, num_shards=3),
    ServedName(diffusers="attn.add_v_proj", served="attn.add_kv_proj", shard=2, num_shards=3),
    ServedName(diffusers="attn.to_out.0", served="attn.to_out"),
)
