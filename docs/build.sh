#!/usr/bin/env bash
# Builds the site from docs/ into build/docs; a dead link, a dead anchor or a page that no index lists is an error.
#
#   bash docs/build.sh            # then open build/docs/index.html
#   bash docs/build.sh OTHER      # into another folder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091 # which is checked by itself
source launch/lib.sh

[[ ${1:-} == -h || ${1:-} == --help ]] && help docs/build.sh && exit
bash launch/venv.sh docs
python=${VENV:-.venv}/bin/python
"$python" docs/links.py
"$python" -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --builder html docs "${1:-build/docs}"
echo "built: ${1:-build/docs}/index.html"
