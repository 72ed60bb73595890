#!/bin/bash
# An aarch64 Python with NumPy, pytest and hypothesis under qemu-user, to run kvedge's tests as an ARM
# machine would, without one. No chroot, no binfmt, no root once the packages are there.
#
#   tools/arm_env.sh DIR      makes, where missing (a minute, 400 MB; needs Python 3.11 and Debian's tools):
#     DIR/rootfs    Debian 12 for arm64: Python 3.11 and its headers
#     DIR/site      aarch64 wheels
#     DIR/host      a virtual environment for building: Cython, setuptools, NumPy
#     DIR/armpy     runs that Python:   QEMU_CPU=cortex-a72 DIR/armpy -m pytest ...
#     DIR/xbuild    cross-compiles:     DIR/xbuild setup.py build_ext --inplace     (KVEDGE_ARM_CC: with another compiler)
#
# Exits with 77 if a tool is missing that it may not install. A child process of the emulated Python is
# not emulated; tests that start one must be left out.
set -euo pipefail
dir=$(realpath -m "${1:?usage: arm_env.sh DIR}")
mkdir -p "$dir"
numpy=2.4.6 pytest=9.2.0 hypothesis=6.170.15 # what tests run with here

packages=()
need() { command -v "$1" >/dev/null || packages+=("${@:2}"); }
need qemu-aarch64-static qemu-user-static
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
[ -d "$dir/rootfs" ] || need mmdebstrap mmdebstrap
if [ ${#packages[@]} -gt 0 ]; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null || {
    echo "arm_env.sh: not installed: ${packages[*]}"
    exit 77
  }
fi

# The wheels and the headers are those of Debian 12's Python, and so the one that builds must be.
python=
for candidate in python3.11 python3 python; do
  "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && python=$candidate && break
done
[ -n "$python" ] || { echo "arm_env.sh: no Python 3.11 here"; exit 77; }

if [ ! -d "$dir/rootfs" ]; then # from the package sources that this machine uses already
  sources=$(ls /etc/apt/sources.list /etc/apt/sources.list.d/*.{sources,list} 2>/dev/null || true)
  rm -rf "$dir/rootfs.new"
  # shellcheck disable=SC2086
  mmdebstrap -q --variant=extract --architectures=arm64 --include=python3,libpython3.11-dev,libstdc++6,libgomp1 \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr bookworm "$dir/rootfs.new" $sources
  mv "$dir/rootfs.new" "$dir/rootfs"
fi
if [ ! -d "$dir/site" ]; then
  rm -rf "$dir/site.new"
  "$python" -m pip install -q --no-compile --disable-pip-version-check --target "$dir/site.new" \
    --platform manylinux2014_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 \
    --platform manylinux_2_17_aarch64 --only-binary=:all: --python-version 311 --implementation cp \
    "numpy==$numpy" "pytest==$pytest" "hypothesis==$hypothesis"
  mv "$dir/site.new" "$dir/site"
fi
if [ ! -x "$dir/host/bin/cythonize" ]; then
  "$python" -m venv "$dir/host"
  "$dir/host/bin/pip" install -q --disable-pip-version-check --upgrade cython setuptools "numpy==$numpy"
fi
mkdir -p "$dir/xsys"
cp "$dir"/rootfs/usr/lib/python3.11/_sysconfigdata__aarch64-linux-gnu.py "$dir/xsys/"

cat > "$dir/armpy" <<X
#!/bin/bash
export PYTHONPATH=$dir/site\${PYTHONPATH:+:\$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
exec qemu-aarch64-static -L $dir/rootfs -cpu "\${QEMU_CPU:-cortex-a72}" $dir/rootfs/usr/bin/python3.11 "\$@"
X
cat > "$dir/xbuild" <<X
#!/bin/bash
export CC=\${KVEDGE_ARM_CC:-aarch64-linux-gnu-gcc}
export LDSHARED="\$CC -shared" _PYTHON_HOST_PLATFORM=linux-aarch64
export _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu PYTHONPATH=$dir/xsys
export CFLAGS="-I$dir/site/numpy/_core/include -I$dir/rootfs/usr/include/python3.11 -idirafter $dir/rootfs/usr/include"
exec $dir/host/bin/python "\$@"
X
chmod +x "$dir/armpy" "$dir/xbuild"
