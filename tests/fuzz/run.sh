#!/bin/bash
# Fuzzing of the C API, of files, and of paged caches. README.md here tells what each harness promises.
#
#   tests/fuzz/run.sh [SECONDS] [HARNESS...]
#
#   SECONDS   for all harnesses together, default 60; 0: only what is in the corpora, once
#   HARNESS   fuzz_api, fuzz_session_c (AddressSanitizer and UndefinedBehaviorSanitizer), fuzz_api_msan (MemorySanitizer),
#             fuzz_session, fuzz_paged; default all but fuzz_api_msan
#
#   tests/fuzz/run.sh minimize [HARNESS...]    build/fuzz/corpus, which runs leave behind, into tests/fuzz/corpus
#
# Prints for each harness executions and coverage, then 'N passed, N failed' (harnesses). Exits with 0, 1 (a finding,
# whose path is printed) or 77 (a tool is missing; says which package brings it). What is built is kept in build/fuzz.
# PYTHON is the Python that has kvedge, default .venv/bin/python or python3; Atheris is installed to build/fuzz.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
built=$root/build/fuzz
seconds=${1:-60}
shift || true
harnesses=("$@")
[ ${#harnesses[@]} -gt 0 ] || harnesses=(fuzz_api fuzz_session_c fuzz_session fuzz_paged)
[[ $seconds =~ ^([0-9]+|minimize)$ ]] || { sed -n '2,/^set/p' "$0" | sed 's/^# \{0,1\}//;/^set/d'; exit 2; }
MAX_FILES=55 # of a corpus

need() { # need COMMAND DEBIAN_PACKAGES
  command -v "$1" >/dev/null && return
  echo "run.sh: $1 is not installed (on Debian: apt-get install $2)"
  exit 77
}

# ---- Building ------------------------------------------------------------------------------------

# compile OBJECT SOURCE FLAGS...: unless the object is newer than its source, the headers and this file
compile() {
  local object=$1 source=$2
  shift 2
  if [ -f "$object" ] && [ -z "$(find "$source" "$root/csrc" "$here" \( -path "$source" -o -name '*.h' \) -newer "$object" -print -quit)" ]; then
    return
  fi
  clang -std=c11 -g1 -O1 -Wall -Wextra -pthread -fno-omit-frame-pointer "-I$root/csrc" "$@" -c "$source" -o "$object.new" &&
    mv "$object.new" "$object"
}

# Clang needs minutes for vector kernels under sanitizers. Checks that are calls, not inlined, make it seconds.
asan_flags() { # of a file of csrc/ or of this folder: its path from the root, without ending
  local kernels=(-fsanitize=address -mllvm -asan-instrumentation-with-call-threshold=0)
  case $1 in
  csrc/kernels/avx512vnni/*) ;; # over five minutes even so: without a sanitizer
  csrc/kernels/avx256/avxvnni) echo "${kernels[@]}" ;;
  csrc/kernels/avx256/avx2) echo "${kernels[@]}" -fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp ;;
  *) echo -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all ;;
  esac
}

msan_flags() {
  local all=(-fsanitize=memory -fsanitize-memory-track-origins)
  case $1 in
  csrc/kernels/*) echo "${all[@]}" -mllvm -msan-instrumentation-with-call-threshold=0 ;;
  *) echo "${all[@]}" -fsanitize=fuzzer-no-link ;;
  esac
}

# build HARNESS: the program $built/HARNESS
build() {
  local objects=() source name object started=$SECONDS sanitizers=address,undefined flags=asan_flags without=
  case $1 in # without: folders of kernels
  fuzz_api_msan) sanitizers=memory flags=msan_flags without=avx512vnni ;;
  fuzz_session_c) without="avx256 avx512vnni neon" ;;
  esac
  mkdir -p "$built/$1.o"
  while read -r source; do
    name=${source#"$root/"}
    name=${name%.c}
    object=$built/$1.o/${name//\//_}.o
    local folder=${name#csrc/kernels/} table=${name##*/}
    if [[ $name == csrc/kernels/*/* && " $without " == *" ${folder%/*} "* ]]; then # a table of the name, which is never chosen
      grep -q "^const kvedge_kernels kvedge_kernels_$table = " "$source" || continue
      source=$built/$1.o/$table.c
      [ -f "$source" ] ||
        echo "#include \"kernels/kernels.h\"
const kvedge_kernels kvedge_kernels_$table = {.name = \"$table\"};" >"$source"
    fi
    # shellcheck disable=SC2046
    compile "$object" "$source" "-DFUZZ_WITHOUT=\"$without\"" $($flags "$name") || return 1
    objects+=("$object")
  done < <(find "$root/csrc" "$here/${1%_msan}.c" -name '*.c' | sort)
  clang -g1 "-fsanitize=$sanitizers,fuzzer" -pthread "${objects[@]}" -o "$built/$1" -lm || return 1
  echo "built in $((SECONDS - started)) s"
}

find_python() {
  python=${PYTHON:-$root/.venv/bin/python}
  [ -x "$(command -v "$python")" ] || python=python3
  need "$python" python3
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  atheris=$built/python$version
  [ -e "$atheris" ] || "$python" -m pip install --quiet --disable-pip-version-check --target "$atheris" atheris ||
    { mkdir -p "$atheris"; echo "Atheris cannot be installed for Python $version; 'rm -r $atheris' to try again"; }
}

# ---- Running -------------------------------------------------------------------------------------

# command_of HARNESS: sets `command`
command_of() {
  case $1 in
  fuzz_api | fuzz_api_msan | fuzz_session_c)
    need clang "clang libclang-rt-14-dev"
    build "$1" || return 1
    export ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1:detect_leaks=1
    export UBSAN_OPTIONS=print_stacktrace=1
    local longest=400
    [ "$1" != fuzz_session_c ] || longest=4000
    command=("$built/$1" -max_len=$longest -len_control=0 -timeout=20 -rss_limit_mb=2048)
    ;;
  fuzz_session | fuzz_paged)
    find_python
    export PYTHONPATH=$root:$atheris PATH # libFuzzer runs the script by its name to minimize
    PATH=$(dirname "$(command -v "$python")"):$PATH
    local longest=400
    [ "$1" = fuzz_paged ] || longest=4000
    command=("$python" "$here/$1.py" -max_len=$longest -len_control=0 -timeout=20 -rss_limit_mb=4096)
    ;;
  *)
    echo "there is no harness $1"
    exit 2
    ;;
  esac
}

corpus_of() { echo "$here/corpus/${1%_msan}"; }

# run HARNESS SECONDS
run() {
  local mine=$built/corpus/${1%_msan} log=$built/$1.log status=0 limit
  mkdir -p "$mine" "$built/findings" "$(corpus_of "$1")"
  echo "-- $1"
  command_of "$1" || return 1
  if [ "$2" -eq 0 ]; then limit=(-runs=0 "$(corpus_of "$1")"); else limit=("-max_total_time=$2" "$mine" "$(corpus_of "$1")"); fi
  "${command[@]}" -print_final_stats=1 "-artifact_prefix=$built/findings/$1-" "${limit[@]}" >"$log" 2>&1 || status=$?
  local executions coverage
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
  coverage=$(grep -o 'cov: [0-9]* ft: [0-9]*' "$log" | tail -1)
  echo "${executions:-0} executions, ${coverage:-coverage not measured}"
  [ $status -eq 0 ] && return
  grep -v '^#[0-9]' "$log" | grep -A 30 -m 1 -E 'not so:|runtime error|ERROR: |WARNING: Mem|Uncaught|Traceback' || tail -20 "$log"
  echo "FAILED: $1; the input: $(sed -n 's/.*Test unit written to //p' "$log" | tail -1); the log: $log"
  return 1
}

# minimize HARNESS: of what runs have found, files that reach each edge
minimize() {
  local from=$built/corpus/${1%_msan} to
  to=$(corpus_of "$1")
  echo "-- $1"
  command_of "$1" || return 1
  rm -rf "$built/minimized" && mkdir -p "$built/minimized" "$to" "$from"
  "${command[@]}" "-artifact_prefix=$built/findings/$1-" -merge=1 -use_counters=0 -use_cmp=0 "$built/minimized" "$to" "$from" >"$built/$1.log" 2>&1 || return 1
  mapfile -t kept < <(ls -S "$built/minimized" | head -$MAX_FILES)
  find "$to" -type f ! -name 'finding-*' ! -name 'seed-*' -delete
  for name in "${kept[@]}"; do cp "$built/minimized/$name" "$to/${name:0:12}"; done
  echo "$(find "$to" -type f | wc -l) files, $(du -cb "$to"/* | tail -1 | cut -f1) bytes"
}

passed=0 failed=0
for harness in "${harnesses[@]}"; do
  if [ "$seconds" = minimize ]; then minimize "$harness"; else run "$harness" $(((seconds + ${#harnesses[@]} - 1) / ${#harnesses[@]})); fi &&
    passed=$((passed + 1)) || failed=$((failed + 1))
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
