#!/usr/bin/env bash
# Usage: launch/check.sh
# Sets up .venv; lints Python, shell scripts and the Dockerfile, checks types and pins, and builds the
# docs so that no link rots.
# It takes the cpu set, on any machine: ruff, mypy, shellcheck, hadolint and mkdocs are in no other.
# `.venv/bin/ruff format` mends the layout, `.venv/bin/ruff check --fix` what it can.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -f .venv/setup-set && $(<.venv/setup-set) == gpu* ]]; then
  echo "check: .venv holds the gpu set, without ruff, mypy, shellcheck, hadolint and mkdocs; run" \
    "launch/check.sh in another clone, which gets the cpu set" >&2
  exit 2
fi
launch/setup.sh cpu
bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy megadiff & # the longest, beside the rest
types=$!
site=$(mktemp -d "${TMPDIR:-/tmp}/megadiff-docs.XXXXXX")
trap 'kill "$types" 2>/dev/null || true; rm -rf "$site"' EXIT
$bin/shellcheck launch/*.sh tests/slurm/*.sh .ci/run
$bin/hadolint launch/Dockerfile
$bin/python launch/check_lock.py
$bin/mkdocs build --strict --quiet --site-dir "$site"
wait "$types"
echo "check: lint, layout, types, pins and docs are right"
