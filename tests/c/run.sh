#!/bin/bash
# Builds csrc/ with each tests/c/test_*.c in a temporary directory and runs them.
#
#   tests/c/run.sh [MODE] [PROGRAM...]       PROGRAM such as test_kernels; default all
#
#   native    this machine's compiler (CC)
#   clang     clang, for this machine, and for aarch64 where its cross libraries are installed
#   asan      AddressSanitizer and UndefinedBehaviorSanitizer
#   tsan      ThreadSanitizer, of test_parallel, test_stress, test_embedder, test_ranges and test_index
#             (both: gcc, or what KVEDGE_SANITIZER_CC names, such as clang)
#   amalgamation  kvedge.c of csrc/amalgamation.py, by gcc and clang, and for aarch64 where that is installed; by default
#             test_layer, test_attention and test_cells
#   standards the sources as C11, GNU11, GNU17 and GNU23, with gcc and clang, -Werror; nothing is run
#   musl      with musl, whose threads have stacks of 128 KiB; with fewer cases
#   valgrind  memcheck, with fewer cases (KVEDGE_TEST_SHORT=1)
#   aarch64   cross-built, run under qemu as Cortex-A72 and, what calls kernels, as Cortex-A76 and with all that qemu has
#             (i8mm), with fewer cases
#   armv7     cross-built for 32-bit ARM with the compiler's defaults, run as Cortex-A9 (no fused
#             multiply-add), and with -mfpu=neon-vfpv4, run as Cortex-A7; with fewer cases
#   oldx86    run as a Nehalem (no AVX: scalar) and as a Haswell (AVX2) under qemu, with fewer cases
#   all       each of these
#
# A program is a main() that prints 'N passed, N failed' and exits with 0 if all is well.
# Exits with 0, 1 (something failed) or 77 (a tool is missing; says which package brings it).
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
mode=${1:-native}
shift || true
programs=("$@")
named=$#
[ ${#programs[@]} -gt 0 ] || programs=($(cd "$here" && ls test_*.c | sed 's/\.c$//'))
work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-c.XXXXXX")
trap 'rm -rf "$work"' EXIT
failures=0

need() { # need COMMAND DEBIAN_PACKAGE
  command -v "$1" >/dev/null && return
  echo "run.sh $mode: $1 is not installed (on Debian: apt-get install $2)"
  exit 77
}

strict=-Werror
sources=($(find "$root/csrc" -name '*.c'))
# build COMPILER...: $sources and every program, in $work/bin. Programs at -O2 at most: at -O3 gcc 12
# for aarch64 ends in an internal error on them.
build() {
  rm -rf "$work/obj"
  build_again "$@"
}
# build_again COMPILER...: the same, beside the objects of the build before.
build_again() {
  rm -rf "$work/bin"
  mkdir -p "$work/obj" "$work/bin"
  echo "== $*"
  compile=("$@" -std=c11 -g -Wall -Wextra -Wpedantic $strict -pthread "-I$root/csrc")
  # Of the library: docs/c_api.md, KVEDGE_STACK_BYTES. Sanitizers' frames are larger.
  frames=(-Wframe-larger-than=16384)
  [[ "$*" != *-fsanitize* ]] || frames=()
  printf '%s\n' "${sources[@]}" | (
    cd "$work/obj" && xargs -P 2 -I '{}' sh -c 'object=$(echo "$1" | tr / _).o; shift; exec "$@" -o "$object"' sh \
      '{}' "${compile[@]}" "${frames[@]}" -c '{}'
  ) || { echo "FAILED to compile csrc"; failures=$((failures + 1)); return 1; }
  for program in "${programs[@]}"; do
    "${compile[@]}" -O2 "$here/$program.c" "$work"/obj/*.o -o "$work/bin/$program" -lm ||
      { echo "FAILED to build $program"; failures=$((failures + 1)); }
  done
}

# run [EMULATOR...]: every program that was built; those of tables.h with the kernel tables named in $tables. A program that
# hangs is ended after half an hour, with exit code 124; --foreground leaves it in the process group that .ci/run and Ctrl-C end.
tables=all
limit=$(command -v timeout >/dev/null && echo timeout --foreground 1800) # macOS has none
run() {
  for program in "${programs[@]}"; do
    [ -x "$work/bin/$program" ] || continue
    echo "-- $* $program"
    arguments=()
    case $program in test_kernels | test_cells | test_cells_of_runs | test_logits) arguments=($tables) ;; esac
    $limit "$@" "$work/bin/$program" "${arguments[@]}"
    status=$?
    [ $status -eq 0 ] || { echo "FAILED: $* $program (exit code $status)"; failures=$((failures + 1)); }
  done
}

# only PROGRAM...: of the programs asked for, those: what differs between CPUs that run the same build.
only() {
  local kept=() program
  for program in "${programs[@]}"; do
    [[ " $* " != *" $program "* ]] || kept+=("$program")
  done
  programs=("${kept[@]}")
}
of_kernels=(test_kernels test_cells test_cells_of_runs test_logits test_rows test_states test_attention)

finish() {
  [ $failures -eq 0 ] && { echo "run.sh $mode: all well"; exit 0; }
  echo "run.sh $mode: $failures FAILED"
  exit 1
}

read -ra sanitizer <<<"${KVEDGE_SANITIZER_CC:-gcc}"
case $mode in
native)
  read -ra compiler <<<"${CC:-cc}" # such as "ccache gcc"
  need "${compiler[0]}" gcc
  build "${compiler[@]}" -O3 && run
  # AVX-VNNI's code in AVX-512VL's encoding, where only that can be run
  if grep -qw avx512_vnni /proc/cpuinfo 2>/dev/null && ! grep -qw avx_vnni /proc/cpuinfo; then
    only test_kernels test_cells test_cells_of_runs
    sources=($(grep -rl --include='*.c' KVEDGE_AVXVNNI_AS_EVEX "$root/csrc"))
    build_again "${compiler[@]}" -O3 -DKVEDGE_AVXVNNI_AS_EVEX && tables=avxvnni run
  fi
  ;;
clang)
  need clang clang
  build clang -O3 && run
  if [ -d /usr/aarch64-linux-gnu/lib ] && command -v qemu-aarch64-static >/dev/null; then
    build clang --target=aarch64-linux-gnu -static -DKVEDGE_TEST_IS_STATIC -O3 && {
      [ -z "${KVEDGE_TEST_SHORT:-}" ] || only "${of_kernels[@]}"
      tables=neondot run qemu-aarch64-static -cpu cortex-a76
      only test_kernels test_cells test_cells_of_runs
      tables=neon run qemu-aarch64-static -cpu cortex-a72
      tables=neoni8mm run qemu-aarch64-static -cpu max
    }
  else
    echo "(clang for aarch64 left out: needs gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)"
  fi
  ;;
amalgamation)
  need python3 python3
  python3 "$root/csrc/amalgamation.py" "$work/one" || exit 1
  sources=("$work/one/kvedge.c")
  [ "$named" -gt 0 ] || programs=(test_layer test_attention test_cells)
  for compiler in gcc clang; do
    need $compiler $compiler
    build $compiler -O2 && run
  done
  if [ -d /usr/aarch64-linux-gnu/lib ] && command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null; then
    build aarch64-linux-gnu-gcc -static -DKVEDGE_TEST_IS_STATIC -O1 && tables=neoni8mm run qemu-aarch64-static -cpu max
  fi
  ;;
asan)
  need "${sanitizer[0]}" "${sanitizer[0]}"
  export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1} UBSAN_OPTIONS=print_stacktrace=1
  strict= # gcc's sanitizers undo loops that a pragma unrolls, and it warns of that under no name
  build "${sanitizer[@]}" -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all && run
  ;;
tsan)
  need "${sanitizer[0]}" "${sanitizer[0]}"
  need setarch util-linux
  programs=(test_parallel test_stress test_embedder test_ranges test_index)
  export TSAN_OPTIONS=${TSAN_OPTIONS:-die_after_fork=0}
  # Without randomized addresses, since some kernels' are more random than its shadow memory bears.
  build "${sanitizer[@]}" -O1 -fsanitize=thread && run setarch -R
  ;;
standards)
  need gcc gcc
  need clang clang
  for compiler in gcc clang; do
    for standard in c11 gnu11 gnu17 gnu2x; do
      echo "== $compiler -std=$standard"
      "$compiler" -std=$standard -Wall -Wextra -Wpedantic -Werror -fsyntax-only "-I$root/csrc" $(find "$root/csrc" -name "*.c") ||
        { echo "FAILED: $compiler -std=$standard"; failures=$((failures + 1)); }
    done
  done
  ;;
musl)
  need musl-gcc "musl-tools musl-dev"
  export KVEDGE_TEST_SHORT=1
  build musl-gcc -static -DKVEDGE_TEST_IS_STATIC -O3 && run
  ;;
valgrind)
  need gcc gcc
  need valgrind valgrind
  export KVEDGE_TEST_HEAP=1 KVEDGE_TEST_SHORT=1
  # test_stack reads stacks below the stack pointer, which memcheck takes for invalid.
  # Threads take turns: without, two that read in a loop may leave a third no processor for an hour.
  build gcc -O2 && rm -f "$work/bin/test_stack" && run valgrind --fair-sched=yes --quiet --error-exitcode=99 --leak-check=full \
    --show-leak-kinds=definite --errors-for-leak-kinds=definite --child-silent-after-fork=yes
  ;;
aarch64)
  need aarch64-linux-gnu-gcc "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
  need qemu-aarch64-static qemu-user-static
  export KVEDGE_TEST_SHORT=1
  if build aarch64-linux-gnu-gcc -static -DKVEDGE_TEST_IS_STATIC -O3; then
    run qemu-aarch64-static -cpu cortex-a72
    only "${of_kernels[@]}"
    tables=neondot run qemu-aarch64-static -cpu cortex-a76
    tables=neoni8mm run qemu-aarch64-static -cpu max
  fi
  ;;
armv7)
  need arm-linux-gnueabihf-gcc "gcc-arm-linux-gnueabihf libc6-dev-armhf-cross"
  need qemu-arm-static qemu-user-static
  export KVEDGE_TEST_SHORT=1
  build arm-linux-gnueabihf-gcc -static -DKVEDGE_TEST_IS_STATIC -O3 && run qemu-arm-static -cpu cortex-a9
  build arm-linux-gnueabihf-gcc -static -DKVEDGE_TEST_IS_STATIC -O3 -mfpu=neon-vfpv4 && tables=neon run qemu-arm-static -cpu cortex-a7
  ;;
oldx86)
  need gcc gcc
  need qemu-x86_64-static qemu-user-static
  # Heap blocks and no pages without access: qemu 7.2 reads what a masked load masks out, which a CPU does not.
  export KVEDGE_TEST_SHORT=1 KVEDGE_TEST_HEAP=1
  build gcc -static -DKVEDGE_TEST_IS_STATIC -O3 && run qemu-x86_64-static -cpu Nehalem && run qemu-x86_64-static -cpu Haswell
  ;;
all)
  missing=0
  for each in native clang amalgamation musl asan tsan valgrind aarch64 armv7 oldx86; do
    "${BASH_SOURCE[0]}" $each "$@"
    case $? in
    0) ;;
    77) missing=77 ;;
    *) failures=$((failures + 1)) ;;
    esac
  done
  [ $failures -gt 0 ] && exit 1
  exit $missing
  ;;
*)
  sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//;/^set/d'
  exit 2
  ;;
esac
finish
