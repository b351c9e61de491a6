"""Programs in Python that this one starts."""

import sys

# "python -m" would look for modules in the current folder first, which may be that of a downloaded checkpoint.
_PROGRAM = """\
import sys
sys.path[:] = sys.argv[2].split("\\n")
import runpy
name = sys.argv.pop(1)
del sys.argv[1]
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def python_module(name: str) -> list[str]:
    """Return the command that runs a module as a program. It finds modules where this process does."""
    return [sys.executable, "-c", _PROGRAM, name, "\n".join(path for path in sys.path if path)]
