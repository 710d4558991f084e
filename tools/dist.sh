#!/bin/bash
# Builds the source distribution, and the wheel from that, into dist/, and checks
# both. Argument: a directory for the tools. Environment: PYTHON;
# TFS_REPOSITORY_URL, which links of the long description then lead to.
set -euo pipefail

venv=$1
cd "$(dirname "$0")/.."

if [[ ! -f $venv/stamp ]]; then
  "$PYTHON" -m pip --disable-pip-version-check --quiet \
    install --upgrade --target "$venv" build twine check-wheel-contents
  touch "$venv/stamp"
fi

# From a copy: setuptools leaves build/ behind.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R setup.py pyproject.toml MANIFEST.in LICENSE README.md CHANGELOG.md \
  tf_strategies examples docs "$copy/"
rm -rf dist
PYTHONPATH=$PWD/$venv "$PYTHON" -m build --outdir dist "$copy" >"$copy/log" 2>&1 ||
  { cat "$copy/log" >&2; exit 1; }

export PYTHONPATH=$venv
"$PYTHON" -m twine check --strict dist/*
"$PYTHON" -m check_wheel_contents --toplevel tf_strategies dist/*.whl
files=$(tar -tzf dist/*.tar.gz)
for name in examples/mnist_keras_fit.py docs/limits.md tf_strategies/py.typed; do
  if [[ $files != *"/$name"* ]]; then
    echo "The source distribution has no $name." >&2
    exit 1
  fi
done
