"""pyproject.toml, MANIFEST.in and the hooks of git, compared with the files of the repository."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.paths import ROOT

# Imported names whose package has another name, or is a part of the interface of another one.
PACKAGES = {
    "PIL": "pillow",
    "markupsafe": "jinja2",
    "opentelemetry": "opentelemetry-sdk",
    "pydantic": "fastapi",
    "pydantic_core": "fastapi",
    "starlette": "fastapi",
    "typing_extensions": "torch",
}
TEXT = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no tomllib


def requirements(name: str) -> list[Requirement]:
    """The requirements of a list in pyproject.toml."""
    found = re.search(rf"^{name} = (\[.*?\])$", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return [Requirement(text) for text in ast.literal_eval(found[1])]


def test_imported_packages_are_declared() -> None:
    names = set()
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
    used = {PACKAGES.get(name, name) for name in names - sys.stdlib_module_names - {"fastinfer"}}
    extras = re.findall(r"^(\w+) = \[", TEXT.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M)
    declared = {requirement.name for name in ("dependencies", *extras) for requirement in requirements(name)}
    assert "huggingface_hub" in used
    assert {name.replace("_", "-") for name in used} <= {name.replace("_", "-") for name in declared}


@pytest.mark.slow
def test_source_distribution(tmp_path: Path) -> None:
    """It has what the build reads, and nothing that a development tree has besides."""
    compiled = shutil.ignore_patterns("__pycache__", "include", "lib", "*.so", "*.egg-info")
    for folder in ("csrc", "cmake", "examples", "python"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=compiled)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "CMakeLists.txt", "CHANGELOG.md", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    expected = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    for name in (
        "cmake/__pycache__/walk.cpython-311.pyc",
        "csrc/gemm/gemm.o",
        "examples/cpp/build/CMakeCache.txt",
        "python/fastinfer/_C.so",
        "python/fastinfer/__pycache__/llm.cpython-311.pyc",
        "tests/.hypothesis/unicode_data/x",
        "tests/support/paths.py",
        "tests/test_layers.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command = [sys.executable, "setup.py", "-q", "sdist"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    [archive] = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as file:
        found = {member.name.partition("/")[2] for member in file if member.isfile()}
    made = {name for name in found if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert found - made == expected


def test_hooks_format_what_lint_checks() -> None:
    folders = re.findall(r"clang-format .*\$\(shell find (.*?) -name", (ROOT / "Makefile").read_text())
    hook = (ROOT / ".pre-commit-config.yaml").read_text().partition("id: clang-format")[2]
    files = re.search(r"files: (.*)", hook)
    assert len(folders) == 2
    assert files
    for folder in " ".join(folders).split():
        assert re.search(files[1], f"{folder}/file.cpp"), folder
