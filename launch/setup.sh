#!/usr/bin/env bash
# Usage: launch/setup.sh [cpu|gpu]
#
# Makes .venv with every version pinned in launch/requirements-{cpu,gpu}.txt.
# Without an argument: gpu where nvidia-smi works, else cpu. Safe to run again: a finished .venv is
# left alone, an interrupted one is repaired.
#
# pip's own configuration decides where packages come from. On a CPU machine PyPI's torch brings 3 GB
# of CUDA libraries that nothing uses; set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU wheels to
# avoid them. PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
LOG=$VENV/setup.log
declare -A NEEDED_GIB=([cpu]=8 [gpu]=25)
# The one that was tested first.
declare -A PYTHONS=(
  [cpu]="python3.11 python3.12 python3"
  [gpu]="python3.12 python3.11 python3"
)
IS_FIT='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

find_python() {
  local candidate
  # shellcheck disable=SC2086  # a list of words
  for candidate in ${PYTHON:+"$PYTHON"} ${PYTHONS[$set]}; do
    if "$candidate" -c "$IS_FIT" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or 3.12 with its venv module" \
    "(tried ${PYTHON:+$PYTHON }${PYTHONS[$set]});" \
    "install one, or set PYTHON=/path/to/python3.11"
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

case "${1:-}" in
  cpu | gpu) set=$1 ;;
  "") if nvidia-smi >/dev/null 2>&1; then set=gpu; else set=cpu; fi ;;
  -h | --help)
    sed -n '2,8s/^# \{0,1\}//p' launch/setup.sh
    exit 0
    ;;
  *) die "unknown set '$1'; use cpu or gpu" ;;
esac
lock=launch/requirements-$set.txt
wanted="$set $(cat launch/setup.sh launch/uv_install.py "$lock" pyproject.toml | sha256sum | cut -d' ' -f1)"
stamp=$VENV/setup-stamp
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
  printf 'setup: %s is up to date (%s)\n' "$VENV" "$set"
  exit 0
fi

started=$SECONDS
rm -f "$stamp"
if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
  python=$(find_python)
  check_disk "${NEEDED_GIB[$set]}"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
fi
: >"$LOG"
pip_install --no-deps "$(grep -E '^uv==' "$lock")" || true
torch=$(grep -E '^torch==' "$lock")
# torch first and with its own dependencies: a CUDA build brings libraries that the lock does not name.
install "$torch" -c "$lock" "$torch"
install "$(grep -c '==' "$lock") pinned packages" --no-deps -r "$lock"
install "megadiff" --no-deps --no-build-isolation -e .
printf 'setup: bytecode ...\n'
# On all cores, where pip would use one. What does not compile here, like templates, nobody imports.
"$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >>"$LOG" 2>&1 || true
"$VENV/bin/python" -c 'import megadiff.cli.main, torch, diffusers, vllm, vllm_omni' >>"$LOG" 2>&1 || {
  tail -n 15 "$LOG" | sed 's/^/  | /' >&2
  die "installed, but the packages do not import together"
}
printf '%s' "$wanted" >"$stamp"
printf 'setup: %s is ready (%s, %d s)\n' "$VENV" "$set" $((SECONDS - started))
