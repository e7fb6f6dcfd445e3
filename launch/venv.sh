#!/usr/bin/env bash
# Makes or refreshes .venv with the extras asked for, as in: bash launch/venv.sh test
# Does nothing where they are there already. PYTHON=python3.12 picks another interpreter, VENV another folder, and
# ONLY="torch==2.9.*" versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:?"which extras? (launch, test, ...)"}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
read -ra only <<<"${ONLY:-}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "$("$python" --version) found, 3.10 or later expected; name one with PYTHON=python3.12" >&2
    exit 2
}
wanted=$(cat pyproject.toml <("$python" --version) <(echo "${only[*]}") | cksum)
stamp=$venv/.has-$extras
for has in "$stamp" "$venv/.has-test"; do # 'test' has all the others in it
    [[ -x $venv/bin/python && -f $has && $(<"$has") == "$wanted" ]] && exit 0
done

[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
echo "installing distaccum[$extras] into $venv (the first time fetches torch)" >&2
# One resolution for torch and torchvision, so that their builds match; uv is several times faster than pip.
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv; then
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --config-settings editable_mode=compat --editable ".[$extras]" "${only[@]}"
else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable ".[$extras]" "${only[@]}"
fi
echo "$wanted" >"$stamp"
