"""Clients for Node, from a folder that FASTINFER_NODE_PACKAGES names."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.served import Served

QUESTION = "Tell me about France."
SCRIPTS = Path(__file__).parent / "node"
MODULES = Path(os.environ.get("FASTINFER_NODE_PACKAGES", "/nowhere")) / "node_modules"


def run(script: str, package: str, served: Served) -> dict[str, Any]:
    """The output of a script."""
    if shutil.which("node") is None or not (MODULES / package).is_dir():
        pytest.skip(f"node or the package {package} is missing")
    address = {"url": served.url, "key": served.key, "model": served.model, "tooLong": served.too_long}
    environment = {**os.environ, "SERVED": json.dumps(address)}
    command = ["node", str(SCRIPTS / script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_openai(served: Served) -> None:
    found = run("openai.mjs", "openai", served)
    expected = served.chat(QUESTION, max_tokens=12)
    assert [found["chat"], found["streamed"], found["response"]] == [expected] * 3
    assert found["usage"] == 12
    assert set(found["structured"]) == {"name", "is_capital"}
    assert found["embedding"] == pytest.approx(served.embedding("one"), abs=1e-6)
    assert (set(found["call"]), found["reason"]) == ({"name", "is_capital"}, "tool_calls")
    assert found["models"] == [served.model]
    assert found["errors"] == ["NotFoundError 404", "AuthenticationError 401", "BadRequestError 400"]


def test_anthropic(served: Served) -> None:
    found = run("anthropic.mjs", "@anthropic-ai/sdk", served)
    expected = served.chat(QUESTION, max_tokens=12)
    assert [found["chat"], found["streamed"]] == [expected] * 2
    assert (found["usage"], found["stop"]) == (12, "max_tokens")
    assert found["tokens"] > 5
    assert (found["call"]["name"], found["reason"]) == ("describe_city", "tool_use")
    assert set(found["call"]["input"]) == {"name", "is_capital"}
    assert found["errors"] == ["NotFoundError 404", "AuthenticationError 401", "BadRequestError 400"]


def test_ai_sdk(served: Served) -> None:
    found = run("ai_sdk.mjs", "@ai-sdk/openai-compatible", served)
    expected = served.chat(QUESTION, max_tokens=12)
    assert [found["chat"], found["streamed"]] == [expected] * 2
    assert found["usage"] == 12
    assert set(found["structured"]) == {"name", "is_capital"}
    assert found["embedding"] == pytest.approx(served.embedding("one"), abs=1e-6)
    assert set(found["call"]) == {"name", "is_capital"}
    assert found["errors"] == ["APICallError 404", "APICallError 401", "APICallError 400"]
