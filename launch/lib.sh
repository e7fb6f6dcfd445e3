# shellcheck shell=bash
# What the scripts here share. They run where the caller is, whose paths are meant; `root` is the repository.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The lines at a script's top are its help.
help() {
    sed -n '2,/^[^#]/{ /^#/!d; s/^# \{0,1\}//; /^shellcheck/d; /^SBATCH/d; p; }' "$1"
}

# stop MESSAGE: one line, and the status of a wrong call.
stop() {
    echo "$(basename "$0"): $1" >&2
    exit 2
}

# whole_number NAME VALUE LEAST: stops where the value is none.
whole_number() {
    [[ $2 =~ ^[0-9]+$ && $((10#$2)) -ge $3 ]] || stop "$1 = $2, expected a whole number of at least $3"
}

# config_is_there "$@": stops where the file of --config is missing, as each rank would after its start.
config_is_there() {
    local before='' word
    for word; do
        [[ $word != --config=* ]] || before=--config word=${word#*=}
        [[ $before != --config || -f $word ]] || stop "--config $word is not there, expected a file such as configs/demo.toml"
        before=$word
    done
}

# read_options "NAME ..." "$@": sets the variable of each --NAME VALUE before --, and `rest` to what comes after it.
read_options() {
    local known=" $1 "
    shift
    while (($#)); do
        case $1 in
            -h | --help) help "$0" && exit ;;
            --)
                shift
                break
                ;;
        esac
        [[ $1 == --* && $known == *" ${1#--} "* ]] ||
            stop "$1 is not known; options of train.py come after --, and --help lists those before it"
        (($# > 1)) || stop "$1 without a value"
        declare -g "${1#--}=$2"
        shift 2
    done
    rest=("$@")
}

# The first node of a Slurm job. No pipe: scontrol would die of one that head has closed, and the script with it.
first_host() {
    local hosts
    command -v scontrol >/dev/null || stop "no scontrol here, which knows the job's first node; give --address"
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    echo "${hosts%%$'\n'*}"
}

# The interpreter: $PYTHON, else that of .venv (or $VENV), else python3; one that has torch and distaccum.
find_python() {
    local python=${PYTHON:-python3}
    [[ -z ${PYTHON:-} && -x ${VENV:-$root/.venv}/bin/python ]] && python=${VENV:-$root/.venv}/bin/python
    command -v "$python" >/dev/null || stop "$python is no interpreter here; name one by PYTHON="
    [[ $python != */* ]] || python=$(realpath -s "$python")
    (cd / && exec "$python" -) <<'CHECK' || stop "$python has no torch or no distaccum; run 'bash launch/venv.sh launch', or name another by PYTHON="
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in ("torch", "distaccum")))
CHECK
    echo "$python"
}
