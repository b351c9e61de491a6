"""What the sources must not contain: code from a socket, and listeners that others reach without being asked to."""

import ast
import re
from collections.abc import Iterator

import pytest
from support.paths import ROOT

from fastinfer.cli.commands import _parser
from fastinfer.server.config import HttpConfig, ServerConfig
from fastinfer.server.router.config import RouterConfig

PACKAGE = ROOT / "python/fastinfer"
# Modules that make objects, and with them calls, of what they read.
UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
UNPICKLING |= {"jsonpickle", "joblib", "xmlrpc", "torch.multiprocessing", "torch.distributed.rpc"}
# The task of a rank, which comes from the process that has started it, by its own pipe.
FROM_PARENT = {"engine/rank_process.py": ["pickle"], "parallel/ranks.py": ["pickle"]}


def unpicklers(source: str) -> Iterator[str]:
    """The imports and calls that can unpickle something."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name in UNPICKLING or name.split(".")[0] in UNPICKLING)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node.func)
            if call in ("torch.load", "numpy.load", "np.load") or node.func.attr in ("recv_pyobj", "recv_object_list"):
                yield call


def test_nothing_is_unpickled() -> None:
    found = {str(path.relative_to(PACKAGE)): list(unpicklers(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == FROM_PARENT


@pytest.mark.parametrize(
    "source", ["import pickle", "from multiprocessing import Pool", "import torch\ntorch.load(x)", "s.recv_pyobj()"]
)
def test_unpicklers_are_found(source: str) -> None:
    assert list(unpicklers(source))


def test_listeners_bind_to_this_machine_alone() -> None:
    for config in (HttpConfig(), ServerConfig(("m",)), RouterConfig()):
        assert config.host == "127.0.0.1"
    for arguments in (["serve"], ["router", "http://h:1"]):
        assert _parser().parse_args(arguments).host == "127.0.0.1"
    everywhere = re.compile(r"""["'](0\.0\.0\.0|::)["']|\.bind\(\(["']["']""")
    found = [path.name for path in (PACKAGE / "server").rglob("*.py") if everywhere.search(path.read_text())]
    assert found == []
