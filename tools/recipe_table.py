"""Write the table of docs/choose_a_recipe.md, from the recipes and their headers.

python tools/recipe_table.py docs/choose_a_recipe.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.observe.text_files import rewrite_page, text_between

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "recipes"
START = "<!-- made by python tools/recipe_table.py docs/choose_a_recipe.md -->\n"
END = "<!-- end of the recipes -->"
HEAD = (
    "| model | trained | GPUs | recipe | samples a step | planned peak GiB, and in which phase "
    "| s a step, planned |",
    "|---|---|---|---|---|---|---|",
)
MODELS = {  # folder of assets/ → how people call it
    "bagel": "BAGEL 7B-MoT",
    "qwen_image": "Qwen-Image",
    "qwen_image_edit_2511": "Qwen-Image-Edit 2511",
    "sd35_large": "SD 3.5 large",
    "sd35_medium": "SD 3.5 medium",
    "wan21_t2v_1_3b": "Wan2.1 T2V 1.3B",
    "wan22_i2v_a14b": "Wan2.2 I2V A14B",
    "wan22_t2v_a14b": "Wan2.2 T2V A14B",
    "wan22_ti2v_5b": "Wan2.2 TI2V 5B",
    "z_image": "Z-Image Base",
}
GIB = r"(\d+\.\d)"
PHASES = rf"rollout {GIB}, sync {GIB}, log_probs {GIB}(?: \([^)]*\))?, update {GIB}"
COMPUTE = r"compute (\d+) s a step"
MEASURED = r"Measured .*?: (\d+) s a step"


def to_markdown() -> str:
    """Return the table of all recipes, by model."""
    files = sorted(RECIPES.glob("*.yaml"), key=lambda file: (_load(file).model.path, file.name))
    return "\n".join([*HEAD, *(_row(file) for file in files)]) + "\n"


def _row(file: Path) -> str:
    config = _load(file)
    cells = (
        MODELS[Path(config.model.path).name],
        f"LoRA {config.lora.rank}" if config.lora.rank else "all weights",
        gpus_of(file),
        f"[{file.name}](../configs/recipes/{file.name})",
        str(config.train.prompts_per_step * config.algorithm.group_size),
        _planned(file),
        _seconds(file),
    )
    return f"| {' | '.join(cells)} |"


@cache
def _load(file: Path) -> Config:
    return load_config([str(file)])


def gpus_of(file: Path) -> str:
    """Return `4 × H200` of a recipe's name, which ends in _4xh200."""
    count, _, kind = file.stem.rpartition("_")[2].partition("x")
    return f"{count} × {kind.upper()}"


def header(file: Path) -> str:
    """Return the recipe's comment at its top as one line."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return " ".join(comments)


def planned_peaks(file: Path) -> dict[str, float]:
    """Return phase → planned GiB, as the header says. Raises ValueError where it does not."""
    match = re.search(PHASES, header(file))
    if not match:
        raise ValueError(
            f"{file} has no header with `rollout X, sync X, log_probs X, update X`; copy the "
            "figures of `megadiff plan`"
        )
    return dict(zip(("rollout", "sync", "log_probs", "update"), map(float, match.groups())))


def _planned(file: Path) -> str:
    peaks = planned_peaks(file)
    phase = max(peaks, key=lambda name: peaks[name])
    match = re.search(r"\(GiB(?: a GPU)? of ([\d.]+)", header(file))
    if not match:
        raise ValueError(f"{file}: its header does not say `(GiB a GPU of X)`")
    return f"{peaks[phase]} of {match[1]}, {phase}"


def _seconds(file: Path) -> str:
    text = header(file)
    planned = re.search(COMPUTE, text)
    if not planned:
        raise ValueError(f"{file}: its header does not say `compute N s a step`, as the plan does")
    measured = re.search(MEASURED, text)
    return f"{planned[1]}{f', measured {measured[1]}' if measured else ''}"


def with_table(page: str) -> str:
    """Return the page with a new table between its marks. Raises ValueError where they lack."""
    return text_between(page, to_markdown(), start=START, end=END)


def main(argv: Sequence[str]) -> int:
    """Rewrite the table of the page that argv names."""
    return rewrite_page(argv, with_table, usage=str(__doc__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
