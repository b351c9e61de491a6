"""Gives every Python process whose PYTHONPATH begins with this folder a torch with a GPU, see fake_torch.py."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterTorch:
    """Finds torch as it would be found without this, and changes it once it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            import fake_torch

            fake_torch.install()

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorch())  # type: ignore[arg-type]
