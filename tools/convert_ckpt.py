"""Write a run's trained weights as a diffusers pipeline folder, which diffusers and vllm-omni load as it is.

    python tools/convert_ckpt.py SRC DST [--base MODEL] [--dtype bfloat16] [--raw]

SRC is a run's folder (its newest checkpoint is taken) or a checkpoint's. Everything but the trained weights is copied from
the model that the run started from. Where the run kept a running average of the weights (algorithm.ema_decay), that is
what is written; --raw takes the weights themselves. Exit codes: 0 done, 2 refused or not written, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from megadiff.weights.export import export_pipeline, model_path, newest_checkpoint


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", type=Path, help="a run's folder, or one of its checkpoints")
    parser.add_argument("dst", type=Path, help="folder to create; refused when it holds something")
    parser.add_argument("--base", type=Path, help="the pipeline folder the run started from; by default its model.path")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--raw", action="store_true", help="not the running average of the weights, but the last ones")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that nothing half-written is left
    try:
        checkpoint = newest_checkpoint(args.src)
        base = args.base or model_path(checkpoint)
        export_pipeline(checkpoint, base, args.dst, dtype=args.dtype, averaged=False if args.raw else None)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{args.dst}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
