"""Loads programs that are not in the package, such as docs/update_help.py."""

import importlib.util
import sys
from types import ModuleType

from support.paths import ROOT


def load_script(path: str) -> ModuleType:
    """Return the module of a file, given by its path in the repository."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
