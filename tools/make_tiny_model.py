"""Write a complete tiny pipeline folder (diffusers layout) in seconds: of Qwen-Image, of Wan2.2
with one or two transformers, or of Stable Diffusion 3 and 3.5.

See examples/tiny_models/. With --size full a
family's real sizes, by tools/random_weights.py, whose own options may follow:

    python tools/make_tiny_model.py OUT --size full [--family wan22_ti2v_5b] [--layers N] \\
        [--text-layers N] [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from examples.tiny_models import bagel, qwen_image, qwen_image_edit, sd3, wan22, z_image

FAMILIES: dict[str, Callable[..., None]] = {
    "qwen_image": qwen_image.write_tiny_pipeline,
    "qwen_image_edit_2509": partial(qwen_image_edit.write_tiny_pipeline, kind="2509"),
    "qwen_image_edit_2511": partial(qwen_image_edit.write_tiny_pipeline, kind="2511"),
    "wan22_ti2v_5b": partial(wan22.write_tiny_pipeline, kind="ti2v_5b"),
    "wan22_t2v_a14b": partial(wan22.write_tiny_pipeline, kind="t2v_a14b"),
    "wan22_i2v_a14b": partial(wan22.write_tiny_pipeline, kind="i2v_a14b"),
    "wan21_t2v_1_3b": partial(wan22.write_tiny_pipeline, kind="t2v_1_3b"),
    "sd35_medium": partial(sd3.write_tiny_pipeline, kind="3_5_medium"),
    "sd35_large": partial(sd3.write_tiny_pipeline, kind="3_5_large"),
    "sd3_medium": partial(sd3.write_tiny_pipeline, kind="3_medium"),
    "z_image": z_image.write_tiny_pipeline,
    "bagel": bagel.write_tiny_bagel,
}
FULL = "full"
ASSETS = Path(__file__).parents[1] / "assets"  # the families' config.json files


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to create; refused when it holds something")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen_image")
    parser.add_argument(
        "--size",
        choices=[*sorted(qwen_image.SIZES), FULL],
        help="tiny by default; full: the real one",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="float32 by default; full: always bfloat16"
    )
    parser.add_argument("--seed", type=int)
    args, others = parser.parse_known_args(argv)
    disable_progress_bar()
    if args.size == FULL:
        if args.dtype or args.seed is not None:
            parser.error("--size full is bfloat16, drawn from seed 0; leave --dtype and --seed out")
        shapes = ASSETS / args.family
        names_model = any(option.partition("=")[0] == "--model" for option in others)
        if not shapes.is_dir() and not names_model:
            parser.error(f"{shapes} does not exist; name a folder with configs by --model")
        return _full_size(args.out, shapes, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        if args.size and args.family != "qwen_image":
            raise ValueError(
                f"--size {args.size}: {args.family} has one tiny size; leave it out, or give "
                "--size full"
            )
        sizes = {"size": args.size} if args.size else {}
        FAMILIES[args.family](args.out, dtype=args.dtype or "float32", seed=args.seed or 0, **sizes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


def _full_size(out: Path, model: Path, options: list[str]) -> int:
    """Run random_weights with these options, which may name another model."""
    import random_weights  # beside this file

    return random_weights.main([str(out), "--model", str(model), *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
