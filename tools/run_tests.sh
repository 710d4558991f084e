#!/bin/bash
# Runs the tests against the installed wheel, from a directory that holds no
# tf_strategies: a module that is missing from the wheel fails here. Arguments:
# the virtual environment, then pytest's arguments.
set -euo pipefail

python=$(cd "$1" && pwd)/bin/python
shift
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for name in tests examples benchmarks pyproject.toml; do
  if [[ -e $root/$name ]]; then cp -R "$root/$name" "$work/"; fi
done
find "$work" -name '__pycache__' -prune -exec rm -rf {} +

cd "$work"
# What matters of the caller's environment for imports and for TensorFlow's idea
# of a cluster must not leak into the tests.
env -u PYTHONPATH -u PYTHONHOME -u TF_CONFIG \
  TFS_SOURCE_DIR="$root" TFS_EXPECT_INSTALLED=1 \
  "$python" -m pytest "$@"
