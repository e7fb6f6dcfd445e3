#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, tests, doctests, the README's code.
#
#   bash tests/run.sh                     # all, 20 minutes on two cores
#   bash tests/run.sh --most              # all but the tests that are marked long, for a machine with a time limit
#   bash tests/run.sh --quick             # style, types, doctests, and the tests that find most mistakes: 2 minutes
#   bash tests/run.sh --quick -k resumed  # of those, the tests with this in their name
#   bash tests/run.sh --slowest 20        # and which took longest
#   bash tests/run.sh -n 0 tests/core/test_law.py
#   bash tests/run.sh --torch 2.13        # on this version of torch, in .venv-2.13; no style, no types
#   bash tests/run.sh --oldest            # on the oldest versions that the README names, in .venv-2.9
#   bash tests/run.sh --versions          # only the tests that touch what other libraries do not promise
#   bash tests/run.sh --device xla        # tests/device on torch_xla's client for CPUs, in .venv-xla
#
# What is not of these goes to pytest (-k, -x, a file, a test). Three workers take a file of tests each at a time, the
# longest first: most of a test of ranks is waiting. -n 0 runs all in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091 # which is checked by itself
source launch/lib.sh

venv=.venv extra=test only='' lint=yes oldest=2.9
words=()
while (($#)); do
    case $1 in
    -h | --help) help tests/run.sh && exit ;;
    --quick) words+=(-m quick) ;;
    --versions) words+=(-m "versions and not long") ;;
    --most) words+=(-m "not long") ;;
    --slowest)
        [[ ${2:-} =~ ^[0-9]+$ ]] || stop "--slowest ${2:-}, expected how many"
        words+=("--durations=$2" --durations-min=0.1) && shift
        ;;
    --device)
        [[ ${2:-} == xla ]] || stop "--device ${2:-}, expected xla"
        # Graphs are compiled once each, so optimising them would take longer than they run.
        export PJRT_DEVICE=CPU XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        venv=.venv-xla extra=xla only="torch==2.9.* torch_xla==2.9.*" lint='' words+=(tests/device) && shift
        ;;
    --oldest | --torch)
        [[ $1 != --oldest ]] || set -- --torch "$oldest" "${@:2}"
        [[ ${2:-} =~ ^[0-9]+\.[0-9]+$ ]] || stop "--torch ${2:-}, expected a version such as 2.13"
        venv=.venv-$2 only="torch==$2.*" lint=''
        [[ $2 != "$oldest" ]] || only+=" accelerate==1.11.* deepspeed==0.18.*"
        shift
        ;;
    *) words+=("$1") ;;
    esac
    shift
done
export ONLY=$only # for tests that run launch/venv.sh too
VENV=$venv bash launch/venv.sh "$extra"
export PATH="$PWD/$venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # or each process that starts compiles all that it imports
if [[ -n $lint ]]; then
    ruff check -q .
    ruff format -q --check .
    mypy --no-error-summary
fi
junit=build/matrix/$venv/all.xml # for tests/programs/matrix.py
exec "$venv/bin/python" -m pytest -q --no-header --junitxml="$junit" -n 3 --dist loadfile --no-loadscope-reorder "${words[@]}"
