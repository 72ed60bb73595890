#!/bin/sh
# Runs the tests on every Python from 3.10 to 3.13 found here: on PATH, or among pyenv's. The oldest
# gets the oldest NumPy that kvedge supports, the others the newest.
set -eu
cd "$(dirname "$0")/.."
tested=0
for version in 3.10 3.11 3.12 3.13; do
  python=
  for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
    if "$candidate" -c 'import venv' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then echo "== Python $version: not on this machine"; continue; fi
  echo "== Python $version: $python"
  make --no-print-directory PYTHON="$python" VENV=".venv-$version" ".venv-$version/test.stamp"
  if [ "$version" = 3.10 ]; then ".venv-$version/bin/python" -m pip install -q 'numpy==1.26.*'; fi
  ".venv-$version/bin/python" -c 'import numpy, kvedge; print("numpy", numpy.__version__, kvedge.isa_info())'
  ".venv-$version/bin/python" -m pytest ${PYTEST_ARGS:-}
  tested=$((tested + 1))
done
[ "$tested" -gt 0 ] || { echo "no Python from 3.10 to 3.13 found" >&2; exit 1; }
