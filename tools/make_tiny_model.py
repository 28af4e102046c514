"""Write a complete tiny Qwen-Image pipeline folder (diffusers layout) in seconds; see megadiff/models/qwen_image/tiny.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from megadiff.models.qwen_image.tiny import SIZES, write_tiny_pipeline


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to create; refused when it holds something")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    disable_progress_bar()
    try:
        write_tiny_pipeline(args.out, size=args.size, dtype=args.dtype, seed=args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
