"""The manifests of deploy/kubernetes, as kubectl would send them."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def check(tool: str, *args: str | Path, source: str) -> str:
    """Run a tool, which must accept its input, and return what it prints."""
    program = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip(f"needs {tool} ({source})")
    result = subprocess.run([program, *args], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@functools.cache
def render(folder: str) -> str:
    """Return the resources of an overlay as YAML."""
    return check("kubectl", "kustomize", KUBERNETES / folder, source="kubectl's own packages")


def documents(folder: str) -> list[Any]:
    """Return the resources of an overlay."""
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    return list(yaml.safe_load_all(render(folder)))


def deployment(folder: str) -> dict[str, Any]:
    """Return the deployment of an overlay."""
    found: dict[str, Any] = next(d for d in documents(folder) if d["kind"] == "Deployment")
    return found
