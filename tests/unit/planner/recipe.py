"""The recipe that most plans are of, and settings that tests put behind it."""

from pathlib import Path

from megadiff.planner.engine_memory import Work

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "configs/recipes/qwen_image_flowgrpo_4xh200.yaml")
MODEL = f"model.path={ROOT / 'assets/qwen_image'}"
EAGER = (
    "engine.compile=false",
    "engine.activation_memory_budget=0",
)  # Megatron's layouts are compared, too
VIDEO = {
    "one": ROOT / "configs/recipes/wan22_ti2v_5b_flowgrpo_8xh200.yaml",
    "experts": ROOT / "configs/recipes/wan22_t2v_a14b_flowgrpo_64xh200.yaml",
}
OFF = ('parity.mode="off"', "algorithm.old_log_prob=rollout")
SEPARATE = ("rollout.mode=separate", "rollout.registry=replicas")
WORK = Work(
    rows=16,
    image_tokens=1024,
    text_tokens=64,
    passes=1,
    itemsize=2,
    stream_itemsize=2,
    budget=0.0,
    num_microbatches=4,
    accumulates=False,
    keeps_average=False,
)
H100 = ("--gpu", "h100", "train.microbatch_size=8")


def sizes(layout: dict) -> tuple:
    return tuple(layout[key] for key in ("backend", "dp", "dp_replicate", "sp", "tp"))
