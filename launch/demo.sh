#!/usr/bin/env bash
# Trains on scikit-learn's digits on two gloo ranks, and proves the run against one process with big batches.
# bash launch/demo.sh --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/venv.sh launch
exec .venv/bin/python launch/demo.py "$@"
