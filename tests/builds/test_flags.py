"""Builds with flags that users and distributions set store the same bytes and compute the same."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(
        sys.platform != "linux" or not (shutil.which("make") and shutil.which("gcc")),
        reason="needs Linux, make and gcc",
    ),
]

MATH = (
    "-ffast-math -funsafe-math-optimizations -fassociative-math -freciprocal-math "
    "-ffinite-math-only -fno-signed-zeros -fno-trapping-math -fno-math-errno -frounding-math "
    "-ffp-contract=fast"
).split()
MATH_OF = {
    "gcc": ["-fsingle-precision-constant", "-fexcess-precision=fast", *(["-mfpmath=387"] * X86)],
    "clang": "-fno-honor-nans -fno-honor-infinities -fapprox-func -ffp-model=fast "
    "-fdenormal-fp-math=preserve-sign".split(),
}
OTHERS = "-funsigned-char -fshort-enums -fpack-struct -fwrapv -fPIE -std=gnu89 -Wall -Werror"
SINGLY = [
    *("-Ofast", "-O0", "-Os", "-flto", "-march=native", "-mno-avx", "-D_FORTIFY_SOURCE=3 -O2"),
    *(
        "-fsanitize=undefined -O1",
        "-fno-strict-aliasing -ftrapv",
        "-fshort-enums",
        "-funsigned-char",
    ),
]


def compiler_of(name):
    if not shutil.which(name):
        pytest.skip(f"needs {name}")
    return f"ccache {name}" if shutil.which("ccache") else name


def run(*command, **variables):
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def digests(folder, compiler, cflags, ldflags=""):
    """What a program prints that is linked to the library of such a build."""
    make = ["make", "-s", "-C", CSRC, f"-j{os.cpu_count()}", f"BUILD={folder}"]
    run(*make, f"CC={compiler}", f"CFLAGS={cflags}", f"LDFLAGS={ldflags}")
    shared = next(folder.glob("libkvedge.so.*"))
    soname = re.search(r"libkvedge\.so\.\d+\.\d+", shared.name)[0]
    (folder / soname).symlink_to(shared.name)
    program = folder / "digest"
    source = ROOT / "tests" / "helpers" / "digest.c"
    sanitizers = [flag for flag in cflags.split() if flag.startswith("-fsanitize")]
    run("gcc", "-std=c11", f"-I{CSRC}", source, shared, *sanitizers, "-o", program)
    return run(program, LD_LIBRARY_PATH=str(folder), KVEDGE_ISA="")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return digests(tmp_path_factory.mktemp("plain"), compiler_of("gcc"), "-O1")


def assert_same(plain, found):
    assert found.splitlines() == plain.splitlines()
    assert not X86 or plain.startswith("mxcsr 0\n")


@pytest.mark.builds
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_flags_of_users_change_neither_bytes_nor_results(name, plain, tmp_path):
    flags = " ".join(["-O1", *MATH, *MATH_OF[name], OTHERS])
    assert_same(plain, digests(tmp_path, compiler_of(name), flags, "-Ofast -pie -Wl,-z,now"))


@pytest.mark.builds
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_the_amalgamation_stores_and_computes_the_same(name, plain, tmp_path):
    """One command, no flag of kvedge's: contraction is off by a pragma, no other name exported."""
    compiler = compiler_of(name).split()
    run("make", "-s", "-C", CSRC, "amalgamation", f"ONE={tmp_path}")
    shared = tmp_path / "libkvedge.so"
    whole = [tmp_path / "kvedge.c", "-lm", "-pthread", "-o", shared]
    run(*compiler, "-O1", "-fPIC", "-shared", *whole)
    program = tmp_path / "digest"
    source = ROOT / "tests" / "helpers" / "digest.c"
    run("gcc", "-std=c11", f"-I{tmp_path}", source, shared, "-o", program)
    assert_same(plain, run(program, LD_LIBRARY_PATH=str(tmp_path), KVEDGE_ISA=""))
    header = re.sub(r"/\*.*?\*/", "", (tmp_path / "kvedge.h").read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"\b(kvedge_[a-z0-9_]+)\(", header))
    exported = run("nm", "-D", "--defined-only", shared)
    assert {line.split()[-1] for line in exported.splitlines()} == declared


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcc", "clang"])
@pytest.mark.parametrize("flags", [*SINGLY, *MATH])
def test_each_flag_alone_changes_neither_bytes_nor_results(flags, name, plain, tmp_path):
    if flags.startswith("-fsanitize") and name == "clang":
        pytest.skip("the program is linked by gcc")
    link = flags if flags.startswith(("-O", "-f")) else ""
    assert_same(plain, digests(tmp_path, compiler_of(name), flags, link))


@pytest.mark.slow
def test_cmake_takes_the_flags_back(plain, tmp_path):
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    build = tmp_path / "build"
    launcher = ["-DCMAKE_C_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    flags = f"-DCMAKE_C_FLAGS=-Ofast {' '.join(MATH)}"
    run("cmake", "-S", CSRC, "-B", build, "-DCMAKE_C_COMPILER=gcc", flags, *launcher)
    run("cmake", "--build", build, "--parallel", os.cpu_count())
    source = ROOT / "tests" / "helpers" / "digest.c"
    run("gcc", "-std=c11", f"-I{CSRC}", source, build / "libkvedge.so", "-o", tmp_path / "digest")
    assert_same(plain, run(tmp_path / "digest", LD_LIBRARY_PATH=str(build), KVEDGE_ISA=""))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("-ffast-math", "-ffast-math"),
        ("-Ofast", "-Ofast"),
        ("-ffinite-math-only", "-ffinite-math-only"),
        ("-funsafe-math-optimizations", "-funsafe-math-optimizations"),
        ("-freciprocal-math", "-freciprocal-math"),
        ("-fno-signed-zeros", "-fno-signed-zeros"),
        ("-fsingle-precision-constant", "-fsingle-precision-constant"),
        pytest.param("-mfpmath=387", "x87", marks=pytest.mark.skipif(not X86, reason="x86's")),
        pytest.param(
            "-funsigned-char", "-funsigned-char", marks=pytest.mark.skipif(not X86, reason="x86's")
        ),
    ],
)
def test_a_build_of_ones_own_is_refused_with_such_flags(flags, named):
    """Every file of csrc/ on its own, with no flag of kvedge's."""
    for source in (
        sorted(CSRC.glob("*/*.c")) if flags == "-ffast-math" else [CSRC / "session/sha256.c"]
    ):
        command = ["gcc", "-std=c11", flags, f"-I{CSRC}", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0, source
        assert "kvedge" in done.stderr and named in done.stderr
