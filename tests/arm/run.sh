#!/bin/bash
# The Python contract suite on an emulated ARM machine, and its stored bytes beside this machine's.
#
#   tests/arm/run.sh CPU...   cortex-a72 (Raspberry Pi 4: neon), cortex-a76 (Pi 5: neondot), max (neoni8mm)
#
# KVEDGE_ARM_SHORT=1   fewer tests: a minute or two, where all take a quarter of an hour
# KVEDGE_ARM_ENV=DIR   where the emulated Python lives (tools/arm_env.sh); default .arm-env
# PYTHON=...           a Python of this machine that has kvedge; default .venv/bin/python
#
# The extension is built in a copy of the checkout. Exits with 0, 1 (something failed) or 77 (a tool is
# missing).
set -euo pipefail
declare -A isa_of=([cortex-a72]=neon [cortex-a76]=neondot [max]=neoni8mm)
: "${1:?usage: run.sh cortex-a72, cortex-a76 or max}"
for cpu in "$@"; do
  [ -n "${isa_of[$cpu]:-}" ] || { echo "run.sh: which kernels does $cpu get? add it here"; exit 2; }
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
env=${KVEDGE_ARM_ENV:-$root/.arm-env}
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || { echo "run.sh: no $python (make test makes it, or set PYTHON)"; exit 77; }

echo "== the environment in $env"
"$root/tools/arm_env.sh" "$env"

echo "== the extension for aarch64"
copy=$env/checkout
mkdir -p "$copy"
for part in csrc kvedge tests; do
  rm -rf "${copy:?}/$part.new"
  cp -a "$root/$part" "$copy/$part.new"
  rm -rf "${copy:?}/$part" && mv "$copy/$part.new" "$copy/$part"
done
cp -a "$root"/{setup.py,pyproject.toml,README.md} "$copy/"
rm -f "$copy"/kvedge/backends/native*.so
(cd "$copy" && KVEDGE_REQUIRE_EXT=1 "$env/xbuild" setup.py -q build_ext --inplace) > "$env/build.log" 2>&1 ||
  { tail -30 "$env/build.log"; echo "run.sh: the build failed"; exit 1; }

export KVEDGE_NO_SUBPROCESS=1 OPENBLAS_NUM_THREADS=1
unset KVEDGE_ISA KVEDGE_BACKEND
armpy() { (cd "$copy" && PYTHONPATH=$copy "$env/armpy" "$@"); }

there=$env/sessions-there here=$env/sessions-here
mkdir -p "$there" "$here"
PYTHONPATH=$root "$python" "$root/tests/arm/stored_bytes.py" > "$env/stored-here.txt"
PYTHONPATH=$root "$python" "$root/tests/arm/next_tokens.py" save "$here" > "$env/tokens-here.txt"

# Left out of the contract suite: what takes long there, or looks at the system's memory, which is this machine's.
# Short: what kernels compute and store; what is Python alone is the same on every CPU.
tests=(tests/contract tests/states)
if [ -n "${KVEDGE_ARM_SHORT:-}" ]; then
  export KVEDGE_TEST_SHORT=1
  tests=(tests/contract/test_storage_bytes.py tests/contract/test_attend_options.py tests/contract/test_float32_layer.py
    tests/contract/test_golden.py)
fi

for cpu in "$@"; do
  export QEMU_CPU=$cpu
  found=$(armpy -c 'import kvedge; print(kvedge.backend, kvedge.isa_info()["isa"])')
  echo "== $cpu runs as: $found"
  [ "$found" = "native ${isa_of[$cpu]}" ] || { echo "run.sh: expected native ${isa_of[$cpu]}"; exit 1; }

  echo "== stored bytes"
  armpy tests/arm/stored_bytes.py > "$env/stored-arm.txt"
  diff "$env/stored-here.txt" "$env/stored-arm.txt" || { echo "run.sh: other bytes than on this machine"; exit 1; }
  echo "the same in $(wc -l < "$env/stored-arm.txt") cases"

  echo "== sessions with states, from there to here and from here to there"
  armpy tests/arm/next_tokens.py go "$here" | diff "$env/tokens-here.txt" -
  armpy tests/arm/next_tokens.py save "$there" > "$env/tokens-there.txt"
  PYTHONPATH=$root "$python" "$root/tests/arm/next_tokens.py" go "$there" | diff "$env/tokens-there.txt" -
  echo "the same tokens after $(wc -l < "$env/tokens-here.txt") sessions"

  echo "== contract suite"
  armpy -m pytest -q -p no:cacheprovider "${tests[@]}"
done
