#!/usr/bin/env bash
# A free-threaded CPython 3.13 (no GIL), compiled from Debian's source package: no package registry has one.
#
#   tools/free_threaded_python.sh DIR     makes DIR/bin/python3.13t where it is missing (some minutes of one core)
#   make test VENV=.venv-t PYTHON=DIR/bin/python3.13t
#
# Needs Debian's apt, gcc, libssl-dev, libffi-dev, zlib1g-dev. Exits with 0, 1 or 77 (the source cannot be had).
set -euo pipefail
dir=$(realpath -m "${1:?usage: free_threaded_python.sh DIR}")
[ ! -x "$dir/bin/python3.13t" ] || exit 0
work=$(mktemp -d "${TMPDIR:-/tmp}/python-t.XXXXXX")
trap 'rm -rf "$work"' EXIT

# The machine's own package source, for Debian 13.
mkdir -p "$work"/{state/lists/partial,cache/archives/partial,source}
uri=$(grep -hoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1 || true)
[ -n "$uri" ] || { echo "free_threaded_python.sh: apt has no source of Debian's packages"; exit 77; }
printf 'Types: deb-src\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' "$uri" >"$work/trixie.sources"
: >"$work/state/status"
apt=(apt-get -qq -o "Dir::State=$work/state" -o "Dir::State::status=$work/state/status" -o "Dir::Cache=$work/cache"
  -o "Dir::Etc::sourcelist=$work/trixie.sources" -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root)
(cd "$work/source" && "${apt[@]}" update && "${apt[@]}" source --download-only python3.13) ||
  { echo "free_threaded_python.sh: no source of python3.13"; exit 77; }
tar -xf "$work"/source/python3.13_*.orig.tar.xz -C "$work"
cd "$work"/Python-3.13.*
./configure -q --disable-gil "--prefix=$dir" --without-static-libpython --disable-test-modules CFLAGS="-O1 -g0"
make -s -j"$(nproc)"
make -s install >/dev/null
"$dir/bin/python3.13t" -VV
