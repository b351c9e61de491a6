"""Programs in Python that this one starts."""

import sys
from pathlib import Path

# "python -m" would look for modules in the current folder first, which may be that of a downloaded checkpoint.
_PROGRAM = """\
import sys
sys.path[:] = sys.argv[2].split("\\n")
import runpy
name = sys.argv.pop(1)
del sys.argv[1]
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
PACKAGES = str(Path(__file__).parents[2])  # the folder of this package


def python_module(name: str) -> list[str]:
    """Return the command that runs a module as a program. It finds modules where :func:`module_path` says."""
    return [sys.executable, "-c", _PROGRAM, name, "\n".join(module_path())]


def module_path() -> list[str]:
    """Return where this process finds modules, without the current folder, which interactive Python adds."""
    return [path for path in [*sys.path, PACKAGES] if path]
