#!/usr/bin/env bash
# The C library as other programs meet it: installed, found, linked; the header in C and C++; the examples.
#
#   tests/library/run.sh [PYTHON]     PYTHON has kvedge installed; default: python3
#
# Everything is built in a temporary folder. CFLAGS of the library are -O1, which compiles in half the time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${1:-python3}")
[ "${python:0:1}" = / ] || python=$PWD/$python
work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-library.XXXXXX")
trap 'rm -rf "$work"' EXIT
passed=0
ok() { passed=$((passed + 1)); }
for tool in cmake pkg-config g++ clang++; do
  command -v "$tool" >/dev/null || { echo "run.sh: $tool is not installed (apt-get install cmake pkg-config g++ clang)"; exit 77; }
done

echo "== the header compiles without a warning as C and C++, by gcc and clang"
for compiler in "gcc -xc -std=c11" "gcc -xc -std=c17" "g++ -xc++ -std=c++17" "g++ -xc++ -std=c++20" \
  "clang -xc -std=c11" "clang -xc -std=c17" "clang++ -xc++ -std=c++17" "clang++ -xc++ -std=c++20"; do
  echo '#include <kvedge.h>' | $compiler -Wall -Wextra -Wpedantic -Werror -fsyntax-only "-I$root/csrc" -
  ok
done

echo "== make install"
prefix=$work/make
make -s -C "$root/csrc" BUILD="$work/make-build" CFLAGS=-O1 PREFIX="$prefix" -j2 install
declared=$(gcc -E -P "$root/csrc/kvedge.h" | tr '\n;' ' \n' | grep -oE '\bkvedge_[a-z0-9_]+ ?\(' | tr -d ' (' | sort -u)
visible=$(nm -D --defined-only "$prefix/lib/libkvedge.so" | awk '{print $3}' | sort -u)
[ "$declared" = "$visible" ] || { echo "declared and visible functions differ:"; diff <(echo "$declared") <(echo "$visible"); exit 1; }
ok
readelf -d "$prefix/lib/libkvedge.so" | grep -q 'SONAME.*libkvedge\.so\.[0-9]'
ok

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
strict="-Wall -Wextra -Wpedantic -Werror"
flags() { pkg-config "$@" kvedge; }
echo "== C++ example, shared and static"
g++ -std=c++17 $strict "$root/examples/cpp/attend.cpp" -o "$work/shared" $(flags --cflags --libs) "-Wl,-rpath,$prefix/lib"
"$work/shared"
ok
clang++ -std=c++20 $strict "$root/examples/cpp/attend.cpp" -o "$work/static" $(flags --cflags) "$prefix/lib/libkvedge.a" -lm -pthread
"$work/static"
ok

echo "== the Llama in C writes what the Python runtime writes, for each format"
gcc -std=c11 $strict -O3 "$root/examples/llama.c" -o "$work/llama" $(flags --cflags) "$prefix/lib/libkvedge.a" -lm -pthread
data=$root/kvedge/data
same_text() { # same_text MODEL TOKENIZER PROMPT
  for format in $("$python" -c 'from kvedge.core.formats import FORMATS; print(*FORMATS)'); do
    "$work/llama" -c "$format" -p "$3" "$1" "$2" >"$work/c.txt" 2>"$work/speed.txt"
    "$python" -m kvedge generate --model "$1" --tokenizer "$2" --prompt "$3" --cache "$format" >"$work/py.txt" 2>/dev/null
    cmp "$work/c.txt" "$work/py.txt"
    cat "$work/speed.txt"
    ok
  done
}
same_text "$data/stories260K.bin" "$data/tok512.bin" "Once upon a time"
shared=$root/../shared/models
[ ! -e "$shared/books5M.bin" ] || same_text "$shared/books5M.bin" "$shared/tok2048.bin" "The old man sat"

echo "== a session: saved and gone on with in C, loaded in Python"
llama() { "$work/llama" -i "$@" "$data/stories260K.bin" "$data/tok512.bin" 2>/dev/null; }
llama -n 80 >"$work/whole.txt"
llama -n 40 -S "$work/session" >"$work/halves.txt"
llama -n 40 -L "$work/session" >>"$work/halves.txt"
[ "$(tr -d '\n' <"$work/whole.txt")" = "$(tr -d '\n' <"$work/halves.txt")" ]
ok
"$python" -c 'import sys, kvedge; cache = kvedge.KVCache.load(sys.argv[1]); assert len(cache) == 40, len(cache)' "$work/session"
ok

echo "== CMake: find_package and add_subdirectory"
cmake -S "$root/csrc" -B "$work/cmake-build" -DCMAKE_BUILD_TYPE= -DCMAKE_C_FLAGS=-O1 "-DCMAKE_INSTALL_PREFIX=$work/cmake" >/dev/null
cmake --build "$work/cmake-build" -j2 --target install >/dev/null
mkdir "$work/user"
cat >"$work/user/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(user LANGUAGES C CXX)
if(KVEDGE_SOURCE)
  add_subdirectory(${KVEDGE_SOURCE} kvedge)
else()
  find_package(kvedge 0.2 REQUIRED)
endif()
add_executable(attend ${EXAMPLE})
target_compile_features(attend PRIVATE cxx_std_17)
target_link_libraries(attend PRIVATE kvedge::kvedge)
CMAKE
for shared in ON OFF; do
  cmake -S "$work/user" -B "$work/find-$shared" -DBUILD_SHARED_LIBS=$shared "-DEXAMPLE=$root/examples/cpp/attend.cpp" \
    "-DCMAKE_PREFIX_PATH=$work/cmake" >/dev/null
  cmake --build "$work/find-$shared" >/dev/null
  "$work/find-$shared/attend"
  ok
done
cmake -S "$work/user" -B "$work/sub" -DCMAKE_C_FLAGS=-O1 "-DKVEDGE_SOURCE=$root/csrc" "-DEXAMPLE=$root/examples/cpp/attend.cpp" >/dev/null
cmake --build "$work/sub" -j2 --target attend >/dev/null
"$work/sub/attend"
ok
PKG_CONFIG_PATH=$(dirname "$(find "$work/cmake" -name kvedge.pc)") pkg-config --exists kvedge
ok

echo "== from the installed Python package: header and library, Cython"
g++ -std=c++17 $strict "$root/examples/cpp/attend.cpp" -o "$work/wheel" $("$python" -m kvedge --cflags --libs)
"$work/wheel"
ok
if "$python" -c 'import Cython, setuptools' 2>/dev/null; then
  cp "$root"/examples/cython/* "$work/user"
  # Cython looks for kvedge's .pxd along the path, where an editable install is not.
  above=$("$python" -c 'import os, kvedge; print(os.path.dirname(os.path.dirname(kvedge.__file__)))')
  (cd "$work/user" && PYTHONPATH=$above "$python" setup.py -q build_ext --inplace && "$python" -c '
import numpy as np, kvedge, attend
layer, twin = attend.Layer(10, 2, 16), kvedge.QuantizedKvLayer(10, 2, 16)
rng = np.random.default_rng(0)
for _ in range(10):
    key, value, query = (rng.standard_normal((n, 16), np.float32) for n in (2, 2, 4))
    out = np.empty((4, 16), np.float32)
    layer.step(key, value, query, out)
    twin.push(key, value)
    assert (out == twin.attend(query)).all()
try:
    layer.step(key, value, query, out)
except RuntimeError as error:
    assert "capacity" in str(error)
else:
    raise SystemExit("an eleventh token was taken")
')
  ok
fi
echo "== inside a ggml graph"
status=0
"$root/tests/library/ggml.sh" "$python" || status=$?
case $status in
0 | 77) ;;
*) exit "$status" ;;
esac
echo "$passed passed, 0 failed"
