#!/usr/bin/env bash
# From a bare Python 3.10 to a trained model and a proof: trains on scikit-learn's digits on two gloo ranks, four
# micro-steps of 8 images on each per update, then again in one process with 64 images in one batch, and compares.
#
#   bash launch/demo.sh [options of train.py]
#
# The run, with its log and the picture of its loss, is in runs/demo, which is made anew.
# PYTHON=python3.12 picks another interpreter to make .venv with, VENV= another folder for it, and UV_TORCH_BACKEND=cpu
# torch without CUDA (1 GB instead of 5). OUT= is another folder for the run, which must not hold one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091 # which is checked by itself
source launch/lib.sh

case ${1:-} in -h | --help) help launch/demo.sh && exit ;; esac
bash launch/venv.sh launch
unset PYTHON
python=$(find_python)
[[ -n ${OUT:-} ]] || rm -rf runs/demo
bash launch/torchrun.sh 2 --config configs/demo.toml "$@" --out "${OUT:-runs/demo}"
exec "$python" launch/prove.py "${OUT:-runs/demo}"
