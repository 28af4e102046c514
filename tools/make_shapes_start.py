"""Write the pipeline folder that pretraining on shapes starts from: a VAE trained here, everything
else random.

    python tools/make_shapes_start.py OUT [--vae-steps N]

Minutes on a GPU. On a CPU it is for tests: with few steps the VAE is bad, and everything still
runs.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to create; refused when it holds something")
    parser.add_argument("--vae-steps", type=int, default=3500)
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--vae-lr", type=float, default=2e-3)
    parser.add_argument("--num-images", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} exists and is not an empty folder; remove it or name another one")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )

    # Imported here: the processes that draw images import this file, and torch would take each of
    # them seconds.
    import torch
    from shapes_vae import train_vae

    from examples.tiny_models.qwen_image import SHAPES_SIZE as size
    from examples.tiny_models.qwen_image import (
        build_text_encoder,
        build_tokenizer,
        silent_transformer,
        write_pipeline,
    )

    torch.manual_seed(args.seed)
    vae = train_vae(
        num_images=args.num_images,
        num_steps=args.vae_steps,
        batch_size=args.vae_batch,
        peak_lr=args.vae_lr,
    )
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(size, tokenizer, seed=args.seed)
    transformer = silent_transformer(size, seed=args.seed)
    write_pipeline(args.out, tokenizer, text_encoder, transformer, vae, dtype="bfloat16")
    sys.stdout.write(f"{args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
