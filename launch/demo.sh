#!/usr/bin/env bash
# Trains on scikit-learn's digits on two gloo ranks, and proves the run against one process with big batches.
# bash launch/demo.sh --help lists the options; RANKS=3 takes another number of ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/venv.sh launch
export OMP_NUM_THREADS=1
case " $* " in
*" --help "* | *" -h "*) exec .venv/bin/python launch/demo.py --help ;;
esac
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" launch/demo.py "$@"
