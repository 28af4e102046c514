#!/usr/bin/env bash
# Usage: launch/quickstart.sh [key=value ...]      e.g. launch/quickstart.sh seed=1 run.name=second
# Sets up .venv, makes a tiny Qwen-Image, trains it (configs/quickstart.yaml) and writes the run's report.
# The last line names the report.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
megadiff=.venv/bin/megadiff

# Where the run goes: the config's run.dir and run.name, unless the arguments say otherwise.
dir=runs name=quickstart model=runs/models/tiny
for argument in "$@"; do
  case $argument in
    run.dir=*) dir=${argument#*=} ;;
    run.name=*) name=${argument#*=} ;;
    model.path=*) model=${argument#*=} ;;
  esac
done

if [[ $model == runs/models/tiny && ! -d $model ]]; then
  .venv/bin/python tools/make_tiny_model.py "$model"
fi
# One thread: the trainer and its replica share the cores, and the model is too small for more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
"$megadiff" train configs/quickstart.yaml "$@"
"$megadiff" report "$dir/$name" >/dev/null
printf 'report: %s\n' "$dir/$name/report.html"
