"""setup.py: flags that are taken back, builds that fail; an extension and its own library."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvedge
from kvedge import c_library

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvedge.__file__).parent
ELF = sys.platform not in ("darwin", "win32")

pytestmark = pytest.mark.subprocess
builds = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("Cython", "setuptools"))) or not shutil.which("gcc"),
    reason="needs Cython, setuptools and gcc",
)
is_compiled = pytest.mark.skipif(
    not (ELF and c_library.LIBRARY.exists() and shutil.which("gcc")),
    reason="needs Linux, the compiled extension and gcc",
)
REPORT = "import json, kvedge; print(json.dumps(kvedge.isa_info()))"


def python(code, path, **variables):
    """Run code that imports the kvedge in a folder; its output, warnings and errors as well."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVEDGE_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": str(path)} | variables,
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources, in which nothing has been built."""
    skipped = shutil.ignore_patterns("*.so", "*.pyc", "native.c", "lib", "include", "build")
    for name in ("csrc", "kvedge"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=skipped)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "checkout")
    return tmp_path / "checkout"


@pytest.fixture
def package(tmp_path):
    """A copy of the installed package, in a folder that PYTHONPATH can name."""
    skipped = shutil.ignore_patterns("*.pyc", "native.c", "data")
    shutil.copytree(PACKAGE, tmp_path / "site" / "kvedge", ignore=skipped)
    return tmp_path / "site"


def build(checkout, *command, **variables):
    return subprocess.run(
        [sys.executable, "setup.py", *command],
        cwd=checkout,
        env=os.environ | {"KVEDGE_REQUIRE_EXT": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def plant(package):
    """What a build of another version has left in a package."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    old = [f"backends/native{suffix}", *(c_library.HEADER, c_library.LIBRARY)]
    old = [
        package / name if isinstance(name, str) else package / name.relative_to(PACKAGE)
        for name in old
    ]
    for file in old:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"old")
    return old


@builds
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["build"], {"CC": "false"}),
        (["build"], {"KVEDGE_NO_EXT": "1"}),
        (["build_ext", "--inplace"], {"CC": "false"}),
    ],
)
def test_a_build_that_fails_packages_nothing_of_the_last_one(command, variables, checkout):
    package = checkout / "kvedge" if "--inplace" in command else checkout / "out" / "kvedge"
    old = plant(package)
    where = [] if "--inplace" in command else ["--build-lib=out"]
    done = build(checkout, *command, *where, **variables)
    assert done.returncode == 0, done.stderr
    assert not [file for file in old if file.exists()]


@builds
@pytest.mark.slow
def test_a_build_with_fast_math_leaves_the_process_its_denormals(checkout):
    compiler = "ccache gcc" if shutil.which("ccache") else "gcc"
    flags = "-Ofast -ffast-math -funsigned-char -fPIE -Wall -Werror"
    done = build(
        checkout, "build_ext", "--inplace", CC=compiler, CFLAGS=flags, LDFLAGS="-Ofast -pie"
    )
    assert done.returncode == 0, done.stderr
    code = (
        "import numpy as np; tiny = np.float64(1e-310); import kvedge; assert tiny * 1.0 != 0; "
        "rows = np.random.default_rng(0).standard_normal((9, 2, 8), np.float32); "
        "layer = kvedge.Float32KvLayer(9, 2, 8); [layer.push(row, row) for row in rows]; "
        "w = np.exp(np.einsum('thd,hd->ht', rows, rows[0]) * 8**-0.5); "
        "w /= w.sum(1, keepdims=True); "
        "assert abs(layer.attend(rows[0]) - np.einsum('ht,thd->hd', w, rows)).max() < 1e-5; "
        "print(kvedge.backend, tiny * 1.0)"
    )
    assert python(code, checkout).split() == ["native", "1e-310"]


def library(folder, soname, version="9.9.9"):
    """Another library of the name, of which the version is enough to know it by."""
    folder.mkdir()
    source, file = folder / "other.c", folder / "libkvedge.so"
    source.write_text(f'const char *kvedge_version(void) {{ return "{version}"; }}\n')
    names = ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    subprocess.run(["gcc", *names, str(source), "-o", str(file)], check=True)
    return file


@is_compiled
@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "LD_PRELOAD"])
def test_the_extension_meets_its_own_library(variable, package, tmp_path):
    soname = "libkvedge.so" if variable == "LD_LIBRARY_PATH" else "libkvedge.so.9.9"
    other = library(tmp_path / "other", soname)
    value = other.parent if variable == "LD_LIBRARY_PATH" else other
    code = "import kvedge, kvedge.backends.native as n; print(kvedge.backend, *n.built_from())"
    backend, *versions, file = python(code, package, **{variable: str(value)}).split()
    assert (backend, versions) == ("native", [kvedge.__version__] * 2)
    assert os.path.samefile(file, package / "kvedge/lib/libkvedge.so")


@is_compiled
def test_a_library_of_the_same_name_that_is_loaded_already_is_named(package, tmp_path):
    other = library(tmp_path / "other", "libkvedge.so")
    said = python(REPORT, package, LD_PRELOAD=str(other))
    assert '"numpy"' in said and str(other) in said
    assert "RuntimeWarning: kvedge runs on NumPy" in said


@is_compiled
def test_files_of_several_versions_are_told_and_not_used(package, tmp_path):
    version = package / "kvedge/_version.py"
    own = version.read_text()
    version.write_text('__version__ = "9.9.9"\n')
    for said in (python(REPORT, package), python(REPORT, package, KVEDGE_BACKEND="native")):
        assert "native." in said and "9.9.9" in said and kvedge.__version__ in said
    assert "BackendUnavailableError" in said and "--no-cache-dir" in said
    assert "9.9.9" in python("import kvedge; kvedge.get_include()", package)
    version.write_text(own)
    shutil.copy(library(tmp_path / "other", "libkvedge.so"), package / "kvedge/lib/libkvedge.so")
    said = python("import kvedge; kvedge.get_library_dir()", package)
    assert "BackendUnavailableError" in said and "9.9.9" in said
