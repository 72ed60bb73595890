#!/usr/bin/env bash
# Compiles csrc/ for other systems with zig as a cross-compiler, warnings as errors, and runs the C tests where an emulator can.
#
#   tools/cross.sh [TARGET...]       default: all. zig comes from PyPI (ziglang) into build/zig
#
#   aarch64-linux-gnu.2.17  aarch64-linux-musl  x86_64-linux-gnu.2.17  x86_64-linux-musl
#   arm-linux-gnueabihf     armv7 with NEON
#   aarch64-macos           compiled, and linked to a shared library; there is nothing to run it with
#   x86_64-windows-gnu      compiled; with wine, where that is installed, examples/llama.c writes its story
#
# KVEDGE_CROSS_SHORT=1    warnings, what a system lacks, linking alone: no optimization, nothing is run
# PYTHON=...              for the environment of zig; default python3
# Exits with 0, 1 (something failed) or 77 (zig cannot be had).
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(aarch64-linux-gnu.2.17 aarch64-linux-musl arm-linux-gnueabihf x86_64-linux-gnu.2.17
  x86_64-linux-musl aarch64-macos x86_64-windows-gnu)
work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-cross.XXXXXX")
trap 'rm -rf "$work"' EXIT
zig=$root/build/zig
[ -x "$zig/bin/python" ] || "${PYTHON:-python3}" -m venv "$zig"
"$zig/bin/python" -c 'import ziglang' 2>/dev/null || "$zig/bin/pip" install -q ziglang ||
  { echo "cross.sh: no ziglang from PyPI"; exit 77; }
export ZIG_GLOBAL_CACHE_DIR=$zig/cache WINEDEBUG=-all KVEDGE_TEST_SHORT=1
cc() { "$zig/bin/python" -m ziglang cc "$@"; }
passed=0 failed=0

# check NAME COMMAND...
check() {
  if "${@:2}" >"$work/log" 2>&1; then passed=$((passed + 1)); else
    echo "FAILED: $1"
    tail -20 "$work/log"
    failed=$((failed + 1))
    return 1
  fi
}

# How a program of that target is run here, with what it needs; nothing: not at all.
runner() {
  case $1 in
  aarch64-linux-musl) echo "qemu-aarch64-static -cpu cortex-a76" ;;
  aarch64-linux-gnu*) echo "qemu-aarch64-static -L /usr/aarch64-linux-gnu -cpu cortex-a72" ;;
  arm-linux-*) echo "qemu-arm-static -L /usr/arm-linux-gnueabihf -cpu cortex-a7" ;;
  x86_64-linux-*) echo "env" ;;
  x86_64-windows-*) echo "wine" ;;
  esac
}

# same_story EMULATOR...: a Windows program's lines end in another way
same_story() {
  local data=$root/kvedge/data
  [ -x "$work/llama" ] || cc -O2 -std=c11 "-I$root/csrc" "$root/examples/llama.c" $(find "$root/csrc" -name '*.c') -pthread -lm -o "$work/llama" || return 1
  "$work/llama" -n 100 "$data/stories260K.bin" "$data/tok512.bin" >"$work/here.txt" &&
    "$@" "$work/llama.exe" -n 100 "$data/stories260K.bin" "$data/tok512.bin" >"$work/there.txt" &&
    tr -d '\r' <"$work/there.txt" | cmp - "$work/here.txt"
}

optimize=-O2 programs=(test_kernels test_layer test_attention test_parallel)
for target in "${targets[@]}"; do
  echo "== $target"
  flags=(-target "$target" -std=c11 $optimize -g0 -Wall -Wextra -Wpedantic -Werror -pthread "-I$root/csrc" -DKVEDGE_EXPORTS)
  library=libkvedge.so
  case $target in
  arm-*) flags+=(-mcpu=cortex_a7+neon) ;;
  *-macos) library=libkvedge.dylib flags+=(-fvisibility=hidden) ;;
  *-windows-*) library=kvedge.dll programs=() ;;
  esac
  case $target in *-windows-*) ;; *) flags+=(-fPIC) ;; esac
  rm -rf "$work/obj" && mkdir "$work/obj"
  compile() {
    (cd "$root" && find csrc -name '*.c') | (cd "$work/obj" && xargs -P 2 -I '{}' sh -c \
      'object=$(echo "$1" | tr / _).o; shift; exec "$@" -o "$object"' sh '{}' "$zig/bin/python" -m ziglang cc "${flags[@]}" -c "$root/{}")
  }
  [ -z "${KVEDGE_CROSS_SHORT:-}" ] || flags+=(-O0 -fno-sanitize=undefined)
  check "$target: compile" compile || continue
  check "$target: $library" cc -target "$target" -shared "$work"/obj/*.o -pthread -o "$work/$library"
  [ -z "${KVEDGE_CROSS_SHORT:-}" ] || continue
  run=$(runner "$target")
  case $target in *-windows-*)
    check "$target: build examples/llama.c" cc "${flags[@]}" "$root/examples/llama.c" "$work"/obj/*.o -o "$work/llama.exe" || continue
    ;;
  esac
  if [ -z "$run" ] || ! command -v "${run%% *}" >/dev/null; then
    echo "($target is not run: no ${run%% *})"
    continue
  fi
  case $target in *-windows-*)
    check "$target: the Llama in C writes its story" same_story $run && echo "examples/llama.c writes what it writes here"
    ;;
  esac
  for program in "${programs[@]}"; do
    check "$target: build $program" cc "${flags[@]}" "$root/tests/c/$program.c" "$work"/obj/*.o -lm -o "$work/$program" || continue
    check "$target: $run $program" $run "$work/$program" && tail -1 "$work/log"
  done
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
