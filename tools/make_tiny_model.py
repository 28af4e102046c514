"""Write a complete tiny model folder of any family in seconds, as examples/tiny_models/ builds it.

With --size full it has the family's real sizes. Those are drawn by tools/random_weights.py, whose
own options may follow:

    python tools/make_tiny_model.py OUT --size full [--family wan22_ti2v_5b] [--layers N] \\
        [--text-layers N] [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from examples.tiny_models import qwen_image
from examples.tiny_models.families import FAMILIES

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
