"""Imports and includes go downward only, and never in a circle.

The two lists below are the architecture: a module may import what stands in an earlier line, or in its own package.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON_LAYERS = """
    errors _C cpp version
    utils
    ops hub outputs structured_output client
    formats sampling_params prompt_schema
    tokenizers weights
    models
    parallel
    engine quantize
    serving nn
    llm integrations
    async_engine evaluation simulation
    train_head
    benchmarks distill
    server
    cli
    ray_serve
"""
CPP_LAYERS = """
    common
    binding
    elementwise norm roofline sampling
    gemm parallel
    quant
    formats linear_attention lora moe
    attention
    rotary
    launch_plan
    library module
"""
Graph = dict[str, set[str]]


def python_graph() -> Graph:
    """Modules of the package and what each imports of it, also inside functions and for type checkers alone."""
    package = ROOT / "python/fastinfer"
    files = {_module(path.relative_to(package)): path for path in package.rglob("*.py") if "include" not in path.parts}
    return {name: set(_imports(path, files)) - {name} for name, path in files.items()}


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip(".")


def _imports(path: Path, files: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            # What is imported may be a module, or something in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package == "fastinfer" and inner:
                if inner != "_C" and inner not in files:
                    inner = inner.rpartition(".")[0]
                yield inner


def cpp_graph() -> Graph:
    csrc = ROOT / "csrc"
    files = [path for path in csrc.rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    included = re.compile(r'^#include "(.+)"', re.MULTILINE)
    return {str(path.relative_to(csrc)): set(included.findall(path.read_text())) for path in files}


def ranks(layers: str) -> dict[str, int]:
    return {name: rank for rank, line in enumerate(layers.split("\n")) for name in line.split()}


def upward(graph: Graph, layers: str, separator: str) -> list[str]:
    """The edges to a later line, or to another package of the same line."""
    rank = ranks(layers)

    def home(name: str) -> str:
        return re.split(separator, name)[0]

    return [
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in sorted(targets)
        if home(name) != home(target) and rank[home(target)] >= rank[home(name)]
    ]


def circle(graph: Graph) -> list[str]:
    """The names along a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_python_imports_go_downward() -> None:
    # The top of the package names its whole public API, for type checkers and on first use.
    graph = {name: targets - {""} for name, targets in python_graph().items() if name not in ("", "__main__")}
    assert not upward(graph, PYTHON_LAYERS, r"\.")


def test_python_imports_have_no_circle() -> None:
    graph = {name: targets - {""} for name, targets in python_graph().items() if name}
    assert not circle(graph)


def test_cpp_includes_go_downward() -> None:
    assert not upward(cpp_graph(), CPP_LAYERS, "[/.]")


def test_cpp_includes_have_no_circle() -> None:
    assert not circle(cpp_graph())


def test_kernels_do_not_see_torch() -> None:
    """Torch's headers end at the bindings: files of binding/, `*_binding.h`, and `.cpp` files that are no kernels."""
    kernels = [
        path
        for path in (ROOT / "csrc").rglob("*.*")
        if path.suffix in (".h", ".cu") or path.name.endswith("_cpu.cpp")
        if path.parent.name != "binding" and not path.name.endswith("_binding.h")
    ]
    sees_torch = re.compile(r'^#include (<torch/|"binding/)', re.MULTILINE)
    assert [path for path in kernels if sees_torch.search(path.read_text())] == []
    assert sum(path.suffix == ".cu" for path in kernels) > 20


@pytest.mark.parametrize("layers", [PYTHON_LAYERS, CPP_LAYERS])
def test_upward_and_circular_edges_are_found(layers: str) -> None:
    low, high = layers.split()[0], layers.split()[-1]
    assert upward({f"{low}.a": {f"{high}.b"}, f"{high}.b": {f"{low}.a"}}, layers, r"\.") == [f"{low}.a -> {high}.b"]
    assert circle({"a": {"b"}, "b": {"a"}})
    assert not circle({"a": {"b"}, "b": set()})
