"""Builds the extension where there is a compiler; without one, kvedge runs on NumPy and says so.

KVEDGE_REQUIRE_EXT=1  a build that fails is an error
KVEDGE_NO_EXT=1       do not even try
KVEDGE_AVXVNNI_AS_EVEX=1  (tests) the avxvnni path in AVX-512VL's encoding, see its file
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# The C library goes into the package once, since a wheel with two would be larger than 2 MB; the
# extension and other programs are linked to it. On Windows, where an extension cannot say where its
# libraries lie, the extension holds the library, and programs get a static one.
LIBRARY = {"darwin": "libkvedge.dylib", "win32": "libkvedge.a"}.get(sys.platform, "libkvedge.so")
# For a ggml that is loaded (docs/llama_cpp.md); linked to the library, and to no ggml.
GGML_FILES = ("lib/libggml-kvedge.so",) if sys.platform == "linux" else ()
LIBRARY_FILES = ("include/kvedge.h", f"lib/{LIBRARY}", *GGML_FILES)
ELF = sys.platform not in ("darwin", "win32")


def flag(name):
    return os.environ.get(name, "") not in ("", "0")


def files(*patterns):
    """The files of patterns such as csrc/**/*.c, relative to this folder."""
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def known_flags(wanted):
    """Those of `wanted` that the compiler knows."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")

    def known(name):
        command = [*compiler, "-Werror", name, "-fsyntax-only", "csrc/system/bits.h"]
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
        except OSError:
            return False  # the build tells of it

    return list(filter(known, wanted))


def last_flags():
    """Of csrc/arithmetic.flags and of what Python's structs depend on, what the compiler knows.

    They come after CFLAGS and LDFLAGS, in compiling and linking: the last flag wins. A warning of
    flags that were taken back is no error.
    """
    lines = (ROOT / "csrc/arithmetic.flags").read_text().splitlines()
    wanted = [line for line in lines if line.startswith("-")]
    return known_flags([*wanted, "-fno-short-enums", "-fno-pack-struct", "-Wno-error"])


def names_in_package():
    """Each function that the extension calls, and the name by which it does so.

    The dynamic linker looks a name up in the program and in LD_PRELOAD's libraries first. So that
    the extension meets its own library where these have another libkvedge, that library has each
    function by a second name, which no other has.
    """
    headers = "".join(
        (ROOT / "csrc" / name).read_text() for name in ("kvedge.h", "system/measuring.h")
    )
    code = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    names = re.findall(r"^[a-z][\w ]*?[ *](kvedge_\w+)\(", code, flags=re.MULTILINE)
    return {name: f"{name}_in_package" for name in names}


def remove_built(package):
    """Take away what an earlier build has left in a package: one that fails would pack it."""
    extensions = (*package.glob("backends/native.*.so"), *package.glob("backends/native.*.pyd"))
    for old in (*extensions, *(package / name for name in LIBRARY_FILES)):
        old.unlink(missing_ok=True)


class BuildPy(build_py):
    """build_py, which every build begins with, also one without an extension."""

    def run(self):
        remove_built(Path(self.build_lib, "kvedge"))
        super().run()


class OptionalBuildExt(build_ext):
    """build_ext that leaves a note and goes on where the extension cannot be built."""

    def run(self):
        remove_built(Path(self.build_lib, "kvedge"))
        if self.inplace:
            remove_built(ROOT / "kvedge")
        try:
            super().run()
        except Exception as error:
            self.give_up(error)

    def build_extension(self, ext):
        try:
            library, glue, for_ggml = self.compile(ext)
            linked = self.link_library(ext, library, for_ggml)
            ext.sources, ext.extra_objects = [], [*glue, *linked]
            super().build_extension(ext)
        except Exception as error:
            self.give_up(error)

    def compile(self, ext):
        """Compile csrc/, the extension's own source, what is for ggml; return the objects."""
        # -O3 pays in the kernels of vector paths, in runs, rotations and 16-bit floats: elsewhere
        # -O2 takes 40 KB less of the wheel. Reading and writing of files, and what Cython writes,
        # which is glue: with -Os they take 73 KB less, and a call 0.1 us more.
        rest = {"extra_postargs": ["-O2" if w == "-O3" else w for w in ext.extra_compile_args]}
        names = names_in_package().items() if ELF else ()
        own = {
            "output_dir": self.build_temp,
            "macros": [*ext.define_macros, *names],
            "include_dirs": ext.include_dirs,
            "depends": ext.depends,
        } | rest
        library = own | {
            "macros": [*ext.define_macros, ("KVEDGE_EXPORTS", None), ("KVEDGE_FOR_PYTHON", None)],
            "include_dirs": ["csrc"],
            "extra_postargs": ext.extra_compile_args,
        }
        sources = files("csrc/**/*.c")
        fast = {s for s in sources if "/kernels/" in s and "/scalar/" not in s}
        fast |= {
            s
            for s in sources
            if s.endswith(("/kivi.c", "/rotation.c", "/small_floats.c", "formats/array.c"))
        }
        least = {"extra_postargs": ["-Os" if w == "-O3" else w for w in ext.extra_compile_args]}
        small = {s for s in sources if "/session/" in s}
        for name in ("store/ranges", "store/edit", "formats/grids", "system/"):
            small |= {s for s in sources if name in s}
        for name in ("attention.c", "call", "parts", "rows", "slices"):
            small |= {s for s in sources if f"/attention/{name}" in s}
        jobs = {s: library if s in fast else library | rest for s in sources}
        jobs |= dict.fromkeys(small, library | least)
        # Partial redundancy elimination makes only copies, but here: heads of 192, 2% of the time.
        scores = {s for s in fast if "/avx512vnni/scores" in s}
        flags = [w for w in ext.extra_compile_args if w != "-fno-tree-pre"]
        jobs |= dict.fromkeys(scores, library | {"extra_postargs": flags})
        for_ggml = files("integrations/ggml/*.c") if GGML_FILES else []
        jobs |= dict.fromkeys([*ext.sources, *for_ggml], own | least)
        objects = compile_side_by_side(self.compiler, jobs)
        return tuple([objects[s] for s in of] for of in (sources, ext.sources, for_ggml))

    def link_library(self, ext, objects, for_ggml):
        """Make the package's library of `objects`, with its header; link `ext` to it.

        And of `for_ggml` a library that finds it in its own folder.

        Returns the objects that the extension takes in itself.
        """
        header, library, *more = (Path(self.build_lib, "kvedge", name) for name in LIBRARY_FILES)
        for file in (header, library):
            self.mkpath(str(file.parent))
        self.copy_file("csrc/kvedge.h", str(header))
        library.unlink(missing_ok=True)
        if library.suffix == ".a":
            self.compiler.create_static_lib(objects, "kvedge", output_dir=str(library.parent))
            return objects
        named, found = [f"-Wl,-install_name,@rpath/{LIBRARY}"], ["-Wl,-rpath,@loader_path/../lib"]
        if ELF:
            # -Bsymbolic-functions: beside another libkvedge, the library calls itself. Without new
            # tags the path is an RPATH, which goes before LD_LIBRARY_PATH.
            named = [f"-Wl,-soname,{LIBRARY}", "-Wl,-Bsymbolic-functions"]
            named += [f"-Wl,--defsym,{own}={name}" for name, own in names_in_package().items()]
            found = ["-Wl,--disable-new-dtags"]
        with linking_libraries(self.compiler):
            self.compiler.link_shared_object(
                objects,
                str(library),
                libraries=["m"],
                extra_postargs=[*ext.extra_link_args, *named],
            )
        if ELF:  # before other folders that LDFLAGS names
            linker = self.compiler.linker_so
            at = linker.index("-shared") + 1 if "-shared" in linker else len(linker)
            linker.insert(at, "-Wl,-rpath,$ORIGIN/../lib")
        for file in more:
            file.unlink(missing_ok=True)
            self.compiler.link_shared_object(
                [*for_ggml, str(library)],
                str(file),
                libraries=["dl", "m"],
                extra_postargs=[
                    *ext.extra_link_args,
                    f"-Wl,-soname,{file.name}",
                    "-Wl,--disable-new-dtags",
                ],
            )
        # By its path: LDFLAGS may have a folder with another libkvedge.
        ext.extra_link_args = [str(library), *ext.extra_link_args, *found]
        return []

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
        remove_built(Path(self.build_lib, "kvedge"))
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


def compile_side_by_side(compiler, jobs):
    """Compile sources, {source: options}, on all processors; return {source: object}.

    Each one that is done is told on the terminal.
    """
    # The largest first: none is left to be waited for alone.
    order = sorted(jobs, key=os.path.getsize, reverse=True)
    affinity = getattr(os, "sched_getaffinity", None)
    with ThreadPoolExecutor(len(affinity(0)) if affinity else os.cpu_count()) as pool:
        made = {pool.submit(compiler.compile, [source], **jobs[source]): source for source in order}
        objects = {}
        for job in as_completed(made):
            [objects[made[job]]] = job.result()
            report(f"kvedge: compiled {len(objects)} of {len(jobs)}: {made[job]}")
    report("")
    return objects


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
    from Cython.Compiler import Options

    Options.docstrings = False  # what is public takes its own from Python's classes
    last = last_flags()
    # -O2 is a later -O than -Ofast, which links crtfastmath.o whatever else is said; and -shared
    # is later than -pie.
    link_args = ["-pthread", "-O2", *last, *(["-shared", "-s"] if ELF else [])]
    if sys.platform == "win32":
        link_args += ["-s", "-static"]  # mingw's threads go into the extension
    macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    if flag("KVEDGE_AVXVNNI_AS_EVEX"):
        macros.append(("KVEDGE_AVXVNNI_AS_EVEX", "1"))
    native = Extension(
        "kvedge.backends.native",
        ["kvedge/backends/native.pyx"],
        include_dirs=["csrc", numpy.get_include()],
        depends=files(
            "csrc/**/*.h",
            "integrations/**/*.[ch]",
            "kvedge/**/*.px[di]",
            "csrc/arithmetic.flags",
            "setup.py",
        ),
        define_macros=macros,
        # -fno-wrapv: Python's own flags let integers wrap, which makes index arithmetic slower.
        # No C++ exception passes through C: without tables to unwind, the wheel has 25 KB less.
        extra_compile_args=[
            "-std=c11",
            "-O3",
            "-fno-wrapv",
            "-fvisibility=hidden",
            "-g0",
            "-pthread",
            *(["-fno-asynchronous-unwind-tables"] * ELF),
            # Kernels have a copy for each case that pays. Those that GCC makes besides pay nowhere:
            # without them the wheel has 60 KB less.
            *known_flags(
                [
                    "-fno-unswitch-loops",
                    "-fno-ipa-cp-clone",
                    "-fno-split-loops",
                    "-fno-version-loops-for-strides",
                    "-fno-tree-pre",
                    "--param=max-completely-peeled-insns=100",
                ]
            ),
            "-iquotecsrc",  # before folders in CPPFLAGS, which may have another kvedge.h
            *last,
        ],
        extra_link_args=link_args,
    )
    free_threading = {"freethreading_compatible": True}  # docs/threads.md
    return cythonize([native], language_level=3, compiler_directives=free_threading)


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt, "build_py": BuildPy})
