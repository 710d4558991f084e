#!/bin/bash
# Builds the documentation into site/; a warning, such as of a link that leads
# nowhere, is an error. Argument: a directory for MkDocs (the package itself is
# read, not imported, so that no TensorFlow is needed). Environment: PYTHON.
set -euo pipefail

venv=$1
cd "$(dirname "$0")/.."

# What setup.py pins, and what schedules are drawn with.
packages=$(grep "^    'docs': " setup.py | grep -o "[^']*==[^']*")
if [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$packages" ]]; then
  rm -rf "$venv"
  "$PYTHON" -m pip --disable-pip-version-check --quiet \
    install --target "$venv" $packages numpy
  echo "$packages" >"$venv/stamp"
fi

# Not --quiet, with which --strict sees no warning. MkDocs is pinned.
NO_MKDOCS_2_WARNING=1 PYTHONPATH=$venv:. "$PYTHON" -m mkdocs build --strict --site-dir site
echo "The documentation is in site/index.html."
