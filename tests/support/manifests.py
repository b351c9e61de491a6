"""The manifests of deploy/kubernetes, as kubectl would send them."""

import functools
import re
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
def render(folder: str, manifests: Path = KUBERNETES) -> str:
    """Return the resources of an overlay as YAML."""
    return check("kubectl", "kustomize", manifests / folder, source="kubectl's own packages")


def documents(folder: str, manifests: Path = KUBERNETES) -> list[Any]:
    """Return the resources of an overlay."""
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    return list(yaml.safe_load_all(render(folder, manifests)))


def deployment(folder: str) -> dict[str, Any]:
    """Return the deployment of an overlay."""
    found: dict[str, Any] = next(d for d in documents(folder) if d["kind"] == "Deployment")
    return found


def containers(resources: list[Any]) -> dict[str, Any]:
    """Return the containers of an overlay by their names, with the commands and variables that the kubelet makes.

    Every secret is the word ``secret``.
    """
    maps = {d["metadata"]["name"]: d["data"] for d in resources if d["kind"] == "ConfigMap"}
    pods = [d["spec"]["template"]["spec"] for d in resources if d["kind"] in ("Deployment", "Job")]
    found = {}
    for container in (container for pod in pods for container in pod["containers"]):
        variables = {item["name"]: _value(item, maps) for item in container["env"]}
        words = {kind: _expand(container[kind], variables) for kind in ("command", "args") if kind in container}
        found[container["name"]] = container | words | {"env": variables}
    return found


def _value(item: dict[str, Any], maps: dict[str, dict[str, str]]) -> str:
    if "value" in item:
        return str(item["value"])
    reference = item["valueFrom"].get("configMapKeyRef")
    return maps[reference["name"]][reference["key"]] if reference else "secret"


def _expand(words: list[str], variables: dict[str, str]) -> list[str]:
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]
