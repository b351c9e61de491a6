"""What the documentation shows is run: the examples of docstrings, and the Python of README.md and docs/.

A block that cannot run on any machine has a line ``<!-- not run: REASON -->`` above it.
"""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from fastinfer import ops
from fastinfer.ops import support

PACKAGE = ROOT / "python/fastinfer"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUM_NOT_RUN = 2  # of a machine with two GPUs, and of a trained draft head

BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = [module_name(path) for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text()]
BLOCKS = [
    pytest.param(match["code"], match["reason"], id=f"{path.relative_to(ROOT)}-{index}")
    for path in PAGES
    if path.name != "serving.md"  # needs a server, with which tests/server/test_serving_page.py runs it
    for index, match in enumerate(BLOCK.finditer(path.read_text()))
]
CONTEXTS = ["batch_invariant", "constant_weights", "prompt_rows", "prompt_rows_of_experts"]
OPERATORS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name)) and name not in CONTEXTS]
CLASSES = [name for name in ops.__all__ if inspect.isclass(getattr(ops, name))]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- docstrings ----


@pytest.mark.usefixtures("model_path")
@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The optional words of an output are dots."""
    failed, attempted = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert attempted > 0
    assert not failed, capsys.readouterr().out


def section(docstring: str, title: str) -> str:
    """The indented lines below ``title:``."""
    match = re.search(rf"^{title}:\n((?: {{4}}.*\n|\n)+)", docstring + "\n", re.MULTILINE)
    assert match, f"no section {title}"
    return match[1]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_documented(name: str) -> None:
    operator = getattr(ops, name)
    docstring = inspect.getdoc(operator)
    assert docstring, "no docstring"
    signature = inspect.signature(operator)
    entries = re.findall(r"^ {4}(\w[\w, ]*):", section(docstring, "Args"), re.MULTILINE)
    documented = [argument for entry in entries for argument in entry.split(", ")]
    assert sorted(documented) == sorted(signature.parameters)
    if signature.return_annotation is not None:
        section(docstring, "Returns")
    section(docstring, "Raises")
    assert ">>> " in docstring
    devices = re.findall(r"^Devices: (.*)\.$", docstring, re.MULTILINE)
    assert len(devices) == 1
    assert name not in support.TABLE or devices == [support.devices(name)]
    sources = re.findall(r"^Source: (.*(?:\n.+)*)\.$", docstring, re.MULTILINE)
    assert len(sources) == (name in support.TABLE or name == "cos_sin_cache")


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_documented(name: str) -> None:
    kind = getattr(ops, name)
    if kind.__module__ == "fastinfer._C":
        pytest.skip("compiled, and made by CPUGraph alone")
    assert ">>> " in (inspect.getdoc(kind) or "")


# ---- pages ----


@pytest.mark.parametrize("name", OPERATORS + CLASSES + CONTEXTS)
def test_every_operator_has_a_page(name: str) -> None:
    shown = {path for page in PAGES for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
    home = getattr(ops, name).__module__
    assert {home, f"fastinfer.ops.{name}"} & shown or home == "fastinfer._C"


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
@pytest.mark.parametrize(("code", "reason"), BLOCKS)
def test_pages(code: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)  # some write files
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


def test_nearly_all_blocks_of_the_pages_run() -> None:
    assert sum(block.values[1] is not None for block in BLOCKS) == NUM_NOT_RUN


def test_no_block_is_overlooked() -> None:
    """One that is indented, or named otherwise."""
    assert BLOCKS
    for path in PAGES:
        text = path.read_text()
        fences = re.findall(r"^ *(?:`{3,}|~{3,}) *(?:python|py)", text, re.MULTILINE)
        assert len(fences) == len(BLOCK.findall(text)), path
