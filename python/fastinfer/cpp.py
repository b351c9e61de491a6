"""Where C++ projects find the kernels without torch: headers, library and CMake package (examples/cpp shows their use).

Importing this loads neither torch nor the library.
"""

from pathlib import Path

PACKAGE = Path(__file__).parent


def get_include() -> str:
    """The folder for a compiler's ``-I``: with it, ``#include <fastinfer/norm/rms_norm.h>`` finds the launcher."""
    return _built("include")


def get_library() -> str:
    """The path of ``libfastinfer.so``: the kernels, with what they share, for a linker's command line."""
    return _built("lib/libfastinfer.so")


def get_cmake_dir() -> str:
    """The folder for ``-Dfastinfer_DIR=``: with it, CMake's ``find_package(fastinfer CONFIG)`` has the target
    ``fastinfer::fastinfer``.
    """
    return _built("lib/cmake/fastinfer")


def _built(name: str) -> str:
    path = PACKAGE / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: fastinfer must be built first (pip install .)")
    return str(path)
