"""Write a complete tiny pipeline folder (diffusers layout) in seconds: of Qwen-Image, or of Wan2.2 with one or two transformers.

See megadiff/models/qwen_image/tiny.py and megadiff/models/wan22/tiny.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from megadiff.models.qwen_image import tiny as qwen_image
from megadiff.models.wan22 import tiny as wan22

FAMILIES: dict[str, Callable[..., None]] = {
    "qwen_image": qwen_image.write_tiny_pipeline,
    "wan22_ti2v_5b": partial(wan22.write_tiny_pipeline, kind="ti2v_5b"),
    "wan22_t2v_a14b": partial(wan22.write_tiny_pipeline, kind="t2v_a14b"),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to create; refused when it holds something")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen_image")
    parser.add_argument("--size", choices=sorted(qwen_image.SIZES), help="of qwen_image; tiny by default")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    disable_progress_bar()
    try:
        if args.size and args.family != "qwen_image":
            raise ValueError(f"--size {args.size}: {args.family} has one size; leave it out")
        sizes = {"size": args.size} if args.size else {}
        FAMILIES[args.family](args.out, dtype=args.dtype, seed=args.seed, **sizes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
