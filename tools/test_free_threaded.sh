#!/usr/bin/env bash
# The wheel in a Python without a GIL: it does not turn the GIL on, and threads keep docs/threads.md's promises.
#
#   tools/test_free_threaded.sh [PYTHON]     default: python3.14t or python3.13t on PATH, else build/python-t/bin/python3.13t,
#                                            which tools/free_threaded_python.sh build/python-t compiles (some minutes)
#
# Its environment is .venv-t. Where NumPy has no wheel for it, pip compiles one, for ten minutes, once.
# KVEDGE_FREE_THREADED_TESTS   which tests; default: those of threads. "tests/contract tests/backend" is all
# Exits with 0, 1 (something failed) or 77 (there is no such Python, or no NumPy for it).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${KVEDGE_FREE_THREADED_VENV:-$root/.venv-t}
tests=${KVEDGE_FREE_THREADED_TESTS:-tests/contract/test_threads.py tests/contract/test_stress.py tests/contract/test_stress_sliding.py
  tests/contract/test_paged_stress.py tests/contract/test_paged_running.py tests/contract/test_recent.py tests/backend}
export KVEDGE_REQUIRE_EXT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
unset KVEDGE_BACKEND KVEDGE_ISA PYTHONPATH PYTHON_GIL

python=
for candidate in ${1:+"$1"} python3.14t python3.13t "$root/build/python-t/bin/python3.13t"; do
  if "$candidate" -c 'import sys; sys.exit(sys._is_gil_enabled())' 2>/dev/null; then python=$candidate && break; fi
  [ -z "${1:-}" ] || break
done
[ -n "$python" ] || { echo "test_free_threaded.sh: no Python without a GIL${1:+ is $1}; tools/free_threaded_python.sh build/python-t compiles one"; exit 77; }

work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-t.XXXXXX")
trap 'rm -rf "$work"' EXIT
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -c 'import numpy' 2>/dev/null ||
  "$venv/bin/pip" install -q numpy -Csetup-args=-Dallow-noblas=true -Csetup-args=-Dcpu-dispatch=none >"$work/numpy.log" 2>&1 ||
  { tail -5 "$work/numpy.log"; echo "test_free_threaded.sh: no NumPy for $python"; exit 77; }
"$venv/bin/pip" install -q 'setuptools>=77' 'Cython>=3.1' 'pytest>=8'
"$venv/bin/pip" install -q --only-binary :all: hypothesis # a version that needs no Rust
git -C "$root" ls-files -z | (cd "$root" && tar --null --no-recursion -cf - -T - 2>/dev/null) | tar -xf - --one-top-level="$work/checkout"
"$venv/bin/pip" install -q --no-build-isolation --no-deps --force-reinstall "$work/checkout"

mkdir "$work/away" && cp -R "$root"/{tests,pyproject.toml} "$work/away/"
cd "$work/away"
export KVEDGE_BACKEND=native
"$venv/bin/python" -W error -c 'import sys, kvedge
print(sys.version, kvedge.__file__, kvedge.isa_info()["isa"])
assert not sys._is_gil_enabled(), "kvedge turned the GIL on"'
# shellcheck disable=SC2086
"$venv/bin/python" -m pytest -q -p no:cacheprovider $tests
