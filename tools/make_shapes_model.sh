#!/usr/bin/env bash
# Usage: tools/make_shapes_model.sh OUT [key=value ...]      Makes assets/shapes from nothing: about 6 minutes on an H200.
# 1. a VAE is trained on generated images, the other parts are random; 2. megadiff pretrains the transformer (algorithm
# sft, configs/shapes/sft.yaml); 3. its averaged weights become a pipeline folder, which is evaluated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: tools/make_shapes_model.sh OUT [key=value ...]}
shift
python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export TOKENIZERS_PARALLELISM=false
start=$SECONDS

[[ -d runs/models/shapes_start ]] || "$python" tools/make_shapes_start.py runs/models/shapes_start
printf 'start model: %s s\n' $((SECONDS - start))
"$python" -m megadiff.cli.main train configs/shapes/sft.yaml "$@"
printf 'pretrained: %s s\n' $((SECONDS - start))
"$python" tools/convert_ckpt.py runs/shapes_sft "$out" --dtype bfloat16
cp assets/shapes/evaluate.yaml "$out/evaluate.yaml"
printf 'written to %s: %s s\n' "$out" $((SECONDS - start))
"$python" -m megadiff.cli.main evaluate "$out"
printf 'evaluated: %s s\n' $((SECONDS - start))
