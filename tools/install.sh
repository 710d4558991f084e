#!/bin/bash
# Makes a virtual environment with the package's wheel in it; quick when nothing
# has changed. Arguments: the environment's directory and the wheel's extras.
# Environment: PYTHON, TF_PACKAGE and TF_VERSION as the Makefile sets them.
set -euo pipefail

venv=$1
extras=$2
root=$(cd "$(dirname "$0")/.." && pwd)
tf_package=$TF_PACKAGE
tf_version=${TF_VERSION:-2.21.0}
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

checksum() { # Of the names and the contents of all files in the directories.
  find "$@" -name '__pycache__' -prune -o -type f -print0 | LC_ALL=C sort -z |
    xargs -0 cksum | cksum
}

fresh() { # fresh <stamp> <content>: whether the stamp holds the content.
  [[ -f $venv/$1 && $(<"$venv/$1") == "$2" ]]
}

remove() { # The environment, also half of one; nothing that is none.
  if [[ -f $venv/pyvenv.cfg ]]; then rm -rf "$venv"; fi
}

make_venv() {
  remove
  if "$PYTHON" -m venv "$venv" >/dev/null 2>&1; then return; fi
  # Debian keeps ensurepip in a package of its own: lend the new environment
  # this interpreter's pip.
  remove
  "$PYTHON" -m venv --without-pip "$venv" &&
    "$PYTHON" -m pip --disable-pip-version-check --quiet \
      --python "$venv/bin/python" install pip
}

# As setup.py says it: TensorFlow has no wheels for others.
if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
then
  echo "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1), and TensorFlow has wheels for" \
    'Python 3.10 to 3.13. Name one of these: make demo PYTHON=python3.13' >&2
  exit 1
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  if ! make_venv; then
    remove
    echo "PYTHON=$PYTHON cannot make a virtual environment, for which it needs" \
      'ensurepip, or pip 22.3 or newer. On Debian and Ubuntu run:' \
      'apt install python3-venv' >&2
    exit 1
  fi
fi

# A mere source change must not resolve and check all requirements again.
requirements=$(cksum "$root/setup.py" "$0"; echo "$tf_package $tf_version")
sources=$(cd "$root" && checksum tf_strategies pyproject.toml; echo "$requirements")
stamp=requirements-${extras//,/-}.stamp
# [dev,mpi] brings all that [examples] does.
if fresh requirements-dev-mpi.stamp "$requirements"; then
  stamp=requirements-dev-mpi.stamp
fi
if fresh "$stamp" "$requirements" && fresh sources.stamp "$sources"; then
  exit 0
fi

# Build from a copy: setuptools leaves build/ behind, and a module that was
# deleted since would be in the next wheel.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for file in setup.py pyproject.toml LICENSE README.md tf_strategies; do
  if [[ -e $root/$file ]]; then cp -R "$root/$file" "$copy/"; fi
done
find "$copy" -name '__pycache__' -prune -exec rm -rf {} +
rm -rf "$venv/wheel"
"${pip[@]}" wheel --no-deps --wheel-dir "$venv/wheel" "$copy"
wheel=$(echo "$venv"/wheel/*.whl)

if ! fresh "$stamp" "$requirements"; then
  case $tf_package in
    tensorflow-cpu) variant=cpu ;;
    *) variant=$tf_package ;;
  esac
  echo "Installing $tf_package $tf_version and [$extras] in $(basename "$venv")"
  "${pip[@]}" install "$wheel[$variant,$extras]" "$tf_package==$tf_version"
  if [[ ,$extras, == *,dev,* ]]; then
    # Keras 2, for tests: it requires the `tensorflow` wheel, whatever is installed.
    "${pip[@]}" install --no-deps "tf_keras==${tf_version%.*}.*"
  fi
  echo "$requirements" >"$venv/$stamp"
fi
"${pip[@]}" install --force-reinstall --no-deps "$wheel"
# So that a test file runs alone, `$venv/bin/python tests/x_test.py`: what is not
# installed (tests, examples) comes from the checkout. Behind site-packages, so
# tf_strategies itself is still the wheel's.
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
echo "$root" >"$site/tf_strategies_checkout.pth"
echo "$sources" >"$venv/sources.stamp"
