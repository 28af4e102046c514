"""Give the rules by which Z-Image's weights are sharded and loaded. Data only."""

from __future__ import annotations

from megadiff.parallel.plan import ParallelPlan

PLAN = ParallelPlan(
    rules={
        "*_embedder.*": "replicated",
        "*_pad_token": "replicated",
        # two blocks that see the image alone and two that see the text alone, before both join
        "*_refiner.*": "replicated",
        "layers.*.adaLN_modulation.0": "modulation",
        "layers.*.attention_norm[12]": "replicated",
        "layers.*.ffn_norm[12]": "replicated",
        "layers.*.attention.norm_[qk]": "head_norm",
        "layers.*.attention.to_[qkv]": "column",
        "layers.*.attention.to_out.0": "row",
        "layers.*.feed_forward.w[13]": "column",
        "layers.*.feed_forward.w2": "row",
        "all_final_layer.*": "replicated",
    },
    blocks="layers.*",
    attention="layers.*.attention",
    # forward takes lists, and makes one stream of image and text itself
    token_inputs=(),
    stream_entry="layers.0",
    stream_exit="all_final_layer.2-1",
    joint_stream=True,
    features=("x", "cap_feats"),
    lora_targets=(
        "layers.*.attention.to_[qkv]",
        "layers.*.attention.to_out.0",
        "layers.*.feed_forward.w[123]",
    ),
)

SERVED_NAMES = {
    "attention.to_qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "feed_forward.w13": ("feed_forward.w1", "feed_forward.w3"),
}
