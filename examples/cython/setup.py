"""Builds attend.pyx against the kvedge that is installed: its header, its library, its .pxd."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import kvedge

attend = Extension(
    "attend",
    ["attend.pyx"],
    include_dirs=[kvedge.get_include()],
    library_dirs=[kvedge.get_library_dir()],
    runtime_library_dirs=[kvedge.get_library_dir()],
    libraries=["kvedge", "m"],
    extra_link_args=["-pthread"],
)
setup(name="attend", ext_modules=cythonize([attend], language_level=3))
