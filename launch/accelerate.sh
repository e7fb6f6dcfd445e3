#!/usr/bin/env bash
# Trains under `accelerate launch`, on what its config file says: processes, and DDP, FSDP or DeepSpeed.
#
#   bash launch/accelerate.sh FILE [options of train.py]
#   bash launch/accelerate.sh configs/accelerate/cpu.yaml --updates 20
#
# FILE: one of configs/accelerate/, or what `accelerate config` wrote.
# PYTHON=... names an interpreter other than that of .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck disable=SC1091 # which is checked by itself
source "$root/launch/lib.sh"

case ${1:-} in
    -h | --help) help "${BASH_SOURCE[0]}" && exit ;;
    '' | -*) stop "which config file? As in: bash launch/accelerate.sh configs/accelerate/cpu.yaml" ;;
esac
file=$1
shift
[[ -f $file ]] || stop "$file is not there, expected a config file such as $(echo "$root"/configs/accelerate/*.yaml)"
grep -q '^ *distributed_type:' "$file" || stop "$file has no distributed_type, expected what 'accelerate config' writes"
config_is_there "$@"
python=$(find_python)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m accelerate.commands.launch --config_file "$file" "$root/launch/train.py" --engine accelerate "$@"
