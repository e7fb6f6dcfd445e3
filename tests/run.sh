#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, tests, doctests, the README's code.
# Arguments go to pytest: bash tests/run.sh -k ddp
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/venv.sh test
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
