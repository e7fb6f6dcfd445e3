#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, tests, doctests, the README's code.
# Arguments go to pytest: bash tests/run.sh -k ddp
# Two workers take a file of tests each at a time: most of a test of ranks is waiting. -n 0 runs all in one process.
# bash tests/run.sh --oldest runs the tests on the oldest versions that the README names, in .venv-oldest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --oldest ]]; then
    shift
    VENV=.venv-oldest ONLY="torch==2.6.* accelerate==1.8.* deepspeed==0.16.*" bash launch/venv.sh test
    exec .venv-oldest/bin/exec python -m pytest -n 2 --dist loadfile "$@"
fi
bash launch/venv.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
exec python -m pytest -n 2 --dist loadfile "$@"
