"""Give the rules by which Qwen-Image's weights are sharded and loaded. Data only."""

from __future__ import annotations

from megadiff.parallel.plan import ParallelPlan

PLAN = ParallelPlan(
    rules={
        "img_in": "replicated",
        "txt_norm": "replicated",
        "txt_in": "replicated",
        "time_text_embed.*": "replicated",
        "transformer_blocks.*_mod.1": "modulation",  # a third of all weights
        "transformer_blocks.*.attn.norm_*": "head_norm",
        "transformer_blocks.*.attn.to_[qkv]": "column",
        "transformer_blocks.*.attn.add_[qkv]_proj": "column",
        "transformer_blocks.*.attn.to_out.0": "row",
        "transformer_blocks.*.attn.to_add_out": "row",
        "transformer_blocks.*_mlp.net.0.proj": "column",
        "transformer_blocks.*_mlp.net.2": "row",
        "norm_out.linear": "replicated",
        "proj_out": "replicated",
    },
    # of models with zero_cond_t (Qwen-Image-Edit-2511): 1 for tokens of given images, else 0
    block_tokens=("modulate_index",),
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

SERVED_NAMES = {
    "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.add_kv_proj": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "attn.to_out": ("attn.to_out.0",),
}
