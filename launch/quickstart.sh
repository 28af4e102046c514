#!/usr/bin/env bash
# Usage: launch/quickstart.sh [key=value ...]      e.g. launch/quickstart.sh seed=1 run.name=second
# Sets up .venv, trains the shipped tiny Qwen-Image (configs/quickstart.yaml) and writes the run's
# report. The last two lines tell its accuracy on held-out prompts before and after, and name the
# report. Relative paths start at the repository, wherever it is called from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh

# Where the run goes: the config's run.dir and run.name, unless the arguments say otherwise.
dir=runs name=quickstart
for argument in "$@"; do
  case $argument in
    run.dir=*) dir=${argument#*=} ;;
    run.name=*) name=${argument#*=} ;;
  esac
done

# One thread each for the trainer and its replicas: they share the cores, and the model is too small
# for more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
.venv/bin/megadiff train configs/quickstart.yaml "$@"
.venv/bin/python - "$dir/$name" <<'PYTHON'
import sys
from pathlib import Path

from megadiff.observe.heldout import compare_ends

result = compare_ends(Path(sys.argv[1]))
if result:
    before = result.baseline.estimate("shapes_strict").mean
    after = result.evaluation.estimate("shapes_strict").mean
    gain = result.difference("shapes_strict")
    print(
        f"held-out accuracy: {before:.1%} before, {after:.1%} after, "
        f"on the same {gain.n} samples: {100 * gain.mean:+.1f} points "
        f"(95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    )
PYTHON
printf 'report: %s\n' "$dir/$name/report.html"
