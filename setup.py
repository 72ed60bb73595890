"""Builds the extension where there is a compiler; without one, kvedge runs on NumPy and says so.

KVEDGE_REQUIRE_EXT=1  a build that fails is an error
KVEDGE_NO_EXT=1       do not even try
KVEDGE_AVXVNNI_AS_EVEX=1  (tests) the avxvnni path in AVX-512VL's encoding, see its file
"""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
C_SOURCES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.c"))
# The C library goes into the package once; the extension and other programs are linked to it. On
# Windows, where an extension cannot say where its libraries lie, the extension holds the library,
# and programs get a static one.
LIBRARY = {"darwin": "libkvedge.dylib", "win32": "libkvedge.a"}.get(sys.platform, "libkvedge.so")
LIBRARY_FILES = ("include/kvedge.h", f"lib/{LIBRARY}")
LINK_ARGS = ["-pthread", *([] if sys.platform == "darwin" else ["-s"])]
if sys.platform == "win32":
    LINK_ARGS.append("-static")  # mingw's threads go into the extension


def flag(name):
    return os.environ.get(name, "") not in ("", "0")


class OptionalBuildExt(build_ext):
    """build_ext that leaves a note and goes on where the extension cannot be built."""

    def run(self):
        try:
            super().run()
        except Exception as error:
            self.give_up(error)

    def build_extension(self, ext):
        try:
            with side_by_side(self.compiler):
                self.build_library(ext)
                super().build_extension(ext)
        except Exception as error:
            self.give_up(error)

    def build_library(self, ext):
        """Build csrc/ as a library, with its header, in the package; link `ext` to it."""
        header, library = (Path(self.build_lib, "kvedge", name) for name in LIBRARY_FILES)
        for file in (header, library):
            self.mkpath(str(file.parent))
        self.copy_file("csrc/kvedge.h", str(header))
        objects = self.compiler.compile(
            C_SOURCES,
            output_dir=self.build_temp,
            macros=[*ext.define_macros, ("KVEDGE_EXPORTS", None)],
            include_dirs=["csrc"],
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        library.unlink(missing_ok=True)
        if library.suffix == ".a":
            self.compiler.create_static_lib(objects, "kvedge", output_dir=str(library.parent))
            ext.extra_objects = objects
            return
        named, origin = f"-Wl,-soname,{LIBRARY}", "$ORIGIN"
        if sys.platform == "darwin":
            named, origin = f"-Wl,-install_name,@rpath/{LIBRARY}", "@loader_path"
        with linking_libraries(self.compiler):
            self.compiler.link_shared_object(
                objects, str(library), libraries=["m"], extra_postargs=[*ext.extra_link_args, named]
            )
        ext.library_dirs = [str(library.parent)]
        ext.libraries = ["kvedge"]
        ext.extra_link_args = [*ext.extra_link_args, f"-Wl,-rpath,{origin}/../lib"]

    def copy_extensions_to_source(self):
        """For an editable install."""
        super().copy_extensions_to_source()
        for name in LIBRARY_FILES:
            if (built := Path(self.build_lib, "kvedge", name)).exists():
                self.mkpath(str((ROOT / "kvedge" / name).parent))
                self.copy_file(str(built), str(ROOT / "kvedge" / name))

    def give_up(self, error):
        if flag("KVEDGE_REQUIRE_EXT"):
            raise error
        width = shutil.get_terminal_size().columns
        print(
            "*" * width,
            f"kvedge: the compiled extension was NOT built ({error}).",
            "kvedge will run on its NumPy backend: the same results, many times slower.",
            "With a C compiler installed, KVEDGE_REQUIRE_EXT=1 shows what stands in the way.",
            "*" * width,
            sep="\n",
            file=sys.stderr,
        )

    def get_outputs(self):
        return [path for path in super().get_outputs() if os.path.exists(path)]


@contextmanager
def side_by_side(compiler):
    """Sources are compiled on all processors, and each that is done is told on the terminal."""
    compile_all = compiler.compile

    def compile_each(sources, *args, **options):
        done = 0

        def compile_one(source):
            nonlocal done
            objects = compile_all([source], *args, **options)
            done += 1
            report(f"kvedge: compiled {done} of {len(sources)}: {source}")
            return objects

        # The largest first: none is left to be waited for alone.
        order = sorted(sources, key=os.path.getsize, reverse=True)
        with ThreadPoolExecutor(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ) as pool:
            objects = dict(zip(order, pool.map(compile_one, order), strict=True))
        return [name for source in sources for name in objects[source]]

    compiler.compile = compile_each
    try:
        yield
    finally:
        compiler.compile = compile_all


@contextmanager
def linking_libraries(compiler):
    """On macOS, what Python links extensions with makes bundles, which nothing can be linked to."""
    before = compiler.linker_so
    compiler.linker_so = ["-dynamiclib" if word == "-bundle" else word for word in before]
    try:
        yield
    finally:
        compiler.linker_so = before


def report(line):
    """To the terminal itself, since pip keeps what a build prints; nowhere where there is none."""
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\r\033[K{line}")


def extensions():
    if flag("KVEDGE_NO_EXT"):
        return []
    import numpy
    from Cython.Build import cythonize

    macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    if flag("KVEDGE_AVXVNNI_AS_EVEX"):
        macros.append(("KVEDGE_AVXVNNI_AS_EVEX", "1"))
    native = Extension(
        "kvedge.backends.native",
        ["kvedge/backends/native.pyx"],
        include_dirs=["csrc", numpy.get_include()],
        depends=sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h")),
        define_macros=macros,
        # -fno-wrapv: Python's own flags let integers wrap, which makes index arithmetic slower.
        extra_compile_args=[
            "-std=c11",
            "-O3",
            "-fno-wrapv",
            "-fvisibility=hidden",
            "-g0",
            "-pthread",
        ],
        extra_link_args=LINK_ARGS,
    )
    free_threading = {"freethreading_compatible": True}  # docs/threads.md
    return cythonize([native], language_level=3, compiler_directives=free_threading)


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt})
