#!/usr/bin/env bash
# Trains on the devices of this machine, a process each.
#
#   bash launch/torchrun.sh [RANKS] [options of train.py]
#   bash launch/torchrun.sh 2 --config configs/ddp-cpu.toml
#
# RANKS: how many processes; as many as GPUs, or as cores where there are none, unless it is given.
# RESTARTS=3 with --resume starts all of them again, from the last checkpoint, when one dies (so often; 0).
# PYTHON=... names an interpreter other than that of .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC1091 # which is checked by itself
source "$root/launch/lib.sh"

ranks=auto
case ${1:-} in -h | --help) help "${BASH_SOURCE[0]}" && exit ;; esac
if [[ ${1:-} =~ ^-?[0-9] ]]; then
    ranks=$1
    whole_number ranks "$ranks" 1
    shift
elif [[ -n ${1:-} && $1 != -* ]]; then
    stop "$1 is no number of ranks; options of train.py begin with --, and --help lists those here"
fi
whole_number RESTARTS "${RESTARTS:-0}" 0
config_is_there "$@"
python=$(find_python)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-0}" \
    "$root/launch/train.py" "$@"
