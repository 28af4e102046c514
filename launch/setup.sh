#!/usr/bin/env bash
# Usage: launch/setup.sh [cpu|gpu] [--te]
#
# Makes .venv with every version pinned in launch/requirements-{cpu,gpu}.txt; with --te also
# Transformer Engine, which is compiled here against the CUDA 13 toolkit.
# Without cpu or gpu: the set that .venv was made for; where there is none, gpu where nvidia-smi
# works, else cpu. Safe to run again: a finished .venv is left alone, an interrupted one is repaired.
#
# pip's own configuration decides where packages come from. On a CPU machine PyPI's torch brings 3 GB
# of CUDA libraries that nothing uses; set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU wheels to
# avoid them. PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
set_file=$VENV/setup-set # also of one that was interrupted, which has no stamp
LOG=$VENV/setup.log
declare -A NEEDED_GIB=([cpu]=8 [gpu]=25)
# The one that was tested first. Older than these, some pin does not install: launch/check_lock.py.
declare -A PYTHONS=(
  [cpu]="python3.11 python3.12 python3"
  [gpu]="python3.12 python3"
)
declare -A OLDEST=([cpu]="3, 11, 5" [gpu]="3, 12")
declare -A VERSIONS=([cpu]="3.11 (3.11.5 or newer) or 3.12" [gpu]="3.12")

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

fits() {
  "$1" -c "import sys, venv, ensurepip
sys.exit(not (${OLDEST[$set]}) <= sys.version_info < (3, 13))" 2>/dev/null
}

find_python() {
  local candidate
  # shellcheck disable=SC2086  # a list of words
  for candidate in ${PYTHON:+"$PYTHON"} ${PYTHONS[$set]}; do
    if fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "the $set set needs Python ${VERSIONS[$set]} with its venv module" \
    "(tried ${PYTHON:+$PYTHON }${PYTHONS[$set]});" \
    "install one, or set PYTHON=/path/to/python3.12"
}

check_disk() {
  local free_gib
  free_gib=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024 / 1024))
  ((free_gib >= $1)) || die "${free_gib} GiB free in $PWD, but the $set set needs $1 GiB;" \
    "free some, or clone elsewhere"
}

# install WHAT OPTION…: by uv, in a quarter of pip's time. What uv does not get, pip may: it knows
# of keyrings and proxies in pip.conf. Quiet; on failure shows the last lines of what they said.
install() {
  local what=$1
  shift
  printf 'setup: %s ...\n' "$what"
  "$VENV/bin/python" launch/uv_install.py "$@" >>"$LOG" 2>&1 || pip_install "$@" || {
    printf 'setup: the last lines of %s:\n' "$LOG" >&2
    tail -n 15 "$LOG" | sed 's/^/  | /' >&2
    die "could not install $what; run launch/setup.sh again once that is fixed"
  }
}

pip_install() {
  local options=(--disable-pip-version-check --no-input --no-compile)
  "$VENV/bin/python" -m pip install "${options[@]}" "$@" >>"$LOG" 2>&1
}

# The toolkit that Transformer Engine is compiled with.
find_cuda() {
  local folder
  local nvcc
  nvcc=$(command -v nvcc || true)
  for folder in ${CUDA_HOME:+"$CUDA_HOME"} ${nvcc:+"${nvcc%/bin/nvcc}"} /usr/local/cuda; do
    if [[ -x $folder/bin/nvcc ]]; then
      echo "$folder"
      return
    fi
  done
  die "--te compiles Transformer Engine, but no CUDA toolkit is here (no nvcc in \$CUDA_HOME/bin," \
    "PATH or /usr/local/cuda/bin); install CUDA 13's, or set CUDA_HOME"
}

set=
te=
for argument in "$@"; do
  case "$argument" in
    cpu | gpu) set=$argument ;;
    --te) te=--te ;;
    -h | --help)
      sed -n '2,11s/^# \{0,1\}//p' launch/setup.sh
      exit 0
      ;;
    *) die "unknown argument '$argument'; use cpu or gpu, and --te" ;;
  esac
done
# Not the node's: a login node without a GPU shares the .venv of those that have one.
if [[ -z $set && -f $set_file ]]; then
  read -r set te_before <"$set_file" || true
  te=${te:-$te_before}
fi
if [[ -z $set ]]; then
  if nvidia-smi >/dev/null 2>&1; then set=gpu; else set=cpu; fi
fi
[[ -z $te || $set == gpu ]] || die "--te needs CUDA; use launch/setup.sh gpu --te"
# Python's own note of where it was made. Moved, its programs name an interpreter that is gone; and
# copied, they run the code of the clone that it comes from.
made_as=$(sed -n 's|^command = .* -m venv [^/]*||p' "$VENV/pyvenv.cfg" 2>/dev/null || true)
if [[ $made_as && ! $made_as -ef $VENV ]]; then
  die "$PWD/.venv was made as $made_as, and its programs look there for Python and megadiff;" \
    "remove it (rm -r .venv), then run launch/setup.sh $set${te:+ $te}"
fi
lock=launch/requirements-$set.txt
te_lock=launch/requirements-te.txt
inputs=(launch/setup.sh launch/uv_install.py "$lock" "$te_lock" pyproject.toml)
wanted="$set$te $(cat "${inputs[@]}" | sha256sum | cut -d' ' -f1)"
stamp=$VENV/setup-stamp
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
  printf 'setup: %s is up to date (%s)\n' "$VENV" "$set${te:+ $te}"
  exit 0
fi

if [[ -f $set_file && $(<"$set_file") != "$set"* ]]; then
  die ".venv holds the other set, and two torches would mix; set up $set in another clone, or" \
    "remove this one (rm -r .venv) once no run on any node uses it"
fi
if [[ -n $te ]]; then
  CUDA_HOME=$(find_cuda)
  export CUDA_HOME
fi

started=$SECONDS
rm -f "$stamp"
if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null || ! fits "$VENV/bin/python"; then
  python=$(find_python)
  check_disk "${NEEDED_GIB[$set]}"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
fi
echo "$set $te" >"$set_file"
: >"$LOG"
pip_install --no-deps "$(grep -E '^uv==' "$lock")" || true
torch=$(grep -E '^torch==' "$lock")
# torch first and with its own dependencies: a CUDA build brings libraries that the lock does not name.
install "$torch" -c "$lock" "$torch"
install "$(grep -c '==' "$lock") pinned packages" --no-deps -r "$lock"
if [[ -n $te ]]; then
  # Without build isolation it is compiled against this torch. Its setup.py imports wheel.
  install "wheel" --no-deps "$(grep '^wheel==' "$te_lock")"
  NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$(nproc) \
    install "Transformer Engine, some minutes" --no-deps --no-build-isolation -r "$te_lock"
fi
install "megadiff" --no-deps --no-build-isolation -e .
printf 'setup: bytecode ...\n'
# On all cores, where pip would use one. What does not compile here, like templates, nobody imports.
# Nor these, a third of all source, but for some modules that are compiled when they are imported.
seldom='/tests?/|/anthropic/|/numba/|/transformers/models/|/model_executor/models/|/diffusers/pipelines/'
"$VENV/bin/python" -m compileall -q -j 0 -x "$seldom" "$VENV/lib" >>"$LOG" 2>&1 || true
"$VENV/bin/python" -c 'import megadiff.cli.main, torch, diffusers, vllm, vllm_omni' >>"$LOG" 2>&1 || {
  tail -n 15 "$LOG" | sed 's/^/  | /' >&2
  die "installed, but the packages do not import together"
}
printf '%s' "$wanted" >"$stamp"
printf 'setup: %s is ready (%s, %d s)\n' "$VENV" "$set" $((SECONDS - started))
