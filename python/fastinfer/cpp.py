"""Paths for C++ projects that use the kernels without torch: headers, library and CMake package.

See examples/cpp. Importing this module loads neither torch nor the library.
"""

from pathlib import Path

PACKAGE = Path(__file__).parent


def get_include() -> str:
    """Return the folder for a compiler's ``-I``; ``#include <fastinfer/norm/rms_norm.h>`` is relative to it."""
    return _built("include")


def get_library() -> str:
    """Return the path of ``libfastinfer.so``, which has all kernels, for a linker's command line."""
    return _built("lib/libfastinfer.so")


def get_cmake_dir() -> str:
    """Return the folder for ``-Dfastinfer_DIR=``.

    CMake's ``find_package(fastinfer CONFIG)`` then defines the target ``fastinfer::fastinfer``.
    """
    return _built("lib/cmake/fastinfer")


def _built(name: str) -> str:
    path = PACKAGE / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: fastinfer must be built first (pip install .)")
    return str(path)
