#!/usr/bin/env bash
# kvedge inside a ggml graph, beside ggml_flash_attn_ext: examples/ggml compares the two.
#
#   tests/library/ggml.sh [PYTHON]     PYTHON has kvedge and llama-cpp-python (which brings ggml); default: python3
#
# Exits with 0, 1 (a result is wrong) or 77 (there is no ggml). `make test-ggml` installs what it needs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${1:-python3}")
[ "${python:0:1}" = / ] || python=$PWD/$python
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)' ||
  { echo "(inside ggml left out: llama-cpp-python, which brings it, is not installed; make test-ggml installs it)"; exit 77; }
work=$(mktemp -d "${TMPDIR:-/tmp}/kvedge-ggml.XXXXXX")
trap 'rm -rf "$work"' EXIT
cp "$root"/examples/ggml/{Makefile,*.[ch]} "$work"
make -s -C "$work" PYTHON="$python" CFLAGS="-O2 -Werror" compare
"$work/compare"
# The header is for llama.cpp, which is C++.
ggml=$("$python" -c 'import importlib.util as u, os; print(os.path.dirname(*u.find_spec("llama_cpp").submodule_search_locations))')
echo '#include <kvedge_ggml.h>' | g++ -xc++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only "-I$work" "-I$ggml/include" "-I$root/csrc" -
echo "2 passed, 0 failed"
