#!/usr/bin/env bash
# What the tests of the launcher have in place of megadiff and torchrun: the files and exit codes
# of a run, without its numbers. A step takes 0.2 s and is saved.
#
# Settings are arguments as of a run: steps=N, serve_s=S (replicas end then), hang=1 (a rank that
# does not answer to TERM), step_s=S, fail_at=N (it ends there).
set -euo pipefail
trap 'exit 1' TERM
dir='' name='' steps=10 serve_s=1000 hang='' step_s=0.2 fail_at=''
for argument in "$@"; do
  case $argument in
    run.dir=*) dir=${argument#*=} ;;
    run.name=*) name=${argument#*=} ;;
    steps=*) steps=${argument#*=} ;;
    serve_s=*) serve_s=${argument#*=} ;;
    step_s=*) step_s=${argument#*=} ;;
    hang=*) hang=yes ;;
    fail_at=*) fail_at=${argument#*=} ;;
  esac
done
folder=$dir/$name

case ${0##*/}-${1:-} in
  megadiff-train)
    [[ $* == *--dry-run* ]]
    run="{\"dir\": \"$dir\", \"name\": \"$name\"}"
    echo "{\"config\": {\"run\": $run, \"rollout\": {\"tp\": 1}}}"
    ;;
  megadiff-serve)
    echo "MASTER_ADDR=$MASTER_ADDR token=${#MEGADIFF_TOKEN} arguments=$*"
    sleep "$serve_s" &
    wait $!
    ;;
  torchrun-*)
    echo "GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-} gpus=${SLURM_GPUS_ON_NODE:-} arguments=$*"
    if [[ $hang ]]; then trap '' TERM; fi
    mkdir -p "$folder/checkpoints"
    step=$(cat "$folder/checkpoints/latest" 2>/dev/null || echo 0)
    while ((step < steps)); do
      if [[ $SLURM_NODEID == 0 && $step == "$fail_at" ]]; then exit 1; fi
      sleep "$step_s" &
      wait $!
      step=$((step + 1))
      if [[ $SLURM_NODEID == 0 ]]; then
        echo "$step" >"$folder/aside"
        mv "$folder/aside" "$folder/checkpoints/latest"
      fi
      if [[ $SLURM_NODEID != 0 && -e $folder/stopped ]]; then
        exit 1
      fi
      # One node decides for all, as ranks agree.
      if [[ $SLURM_NODEID == 0 && -e $folder/stop ]]; then
        echo "stops after step $step, $(<"$folder/stop") s are left"
        touch "$folder/stopped"
        exit 1 # torchrun's, whatever the ranks' is
      fi
    done
    ;;
esac
