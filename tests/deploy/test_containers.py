"""The command lines of images and pods, word for word, in a sandbox with their user, mounts and variables."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from support.container import can_sandbox, health_command, image_environment, instructions, run_in_sandbox
from support.manifests import DEPLOY, containers, documents
from support.proxies import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_sandbox(), reason="needs namespaces of users and bwrap (Debian: bubblewrap)"),
]
IMAGE = instructions(DEPLOY / "Dockerfile")
# The server drains while a stream of 200 tokens goes on.
EXPECTED = {
    "healthy": True,
    "ready": 200,
    "rights": ["0000000000000000"],
    "uid": 10001,
    "writable": ["/tmp"],
    "served during preStop": 200,
    "draining": [503, 200, True],
    "end of the stream": "data: [DONE]",
    "error": False,
    "exit code": 0,
}


def test_both_images_run_the_same_commands() -> None:
    cuda = instructions(DEPLOY / "Dockerfile.cuda")
    for name in ("ENTRYPOINT", "VOLUME", "USER", "EXPOSE", "STOPSIGNAL"):
        assert cuda[name] == IMAGE[name]
    assert health_command(cuda) == health_command(IMAGE)
    assert IMAGE["VOLUME"] == "/models"
    assert IMAGE["USER"] == "10001"


def compose_service(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    service: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][name]
    return service


def test_the_image(model_path: Path) -> None:
    """The command of the compose file; the other services are missing."""
    service = compose_service("server")
    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
    environment = {name: re.sub(r"\$\{.*\}", "secret", value) for name, value in service["environment"].items()}
    plan = {
        "command": [*json.loads(IMAGE["ENTRYPOINT"]), *service.get("command", [])],
        "health": health_command(IMAGE),
        **{"startup": "/ready", "ready": "/ready", "live": "/health", "pre_stop_s": 0, "notice": None},
        **{"key": "secret", "model": "smollm2-135m-instruct"},
    }
    variables = image_environment(IMAGE) | environment
    assert run_in_sandbox(plan, variables, model_path.parent.parent) == EXPECTED


@pytest.mark.parametrize(("folder", "notice"), [("base", None), ("spot", None), ("spot", "aws")])
def test_the_pods(folder: str, notice: str | None, model_path: Path) -> None:
    """The kubelet's part: the probes, preStop (here of half a second), SIGTERM. A spot machine's notice comes first."""
    server = containers(documents(folder))["server"]
    assert [mount["mountPath"] for mount in server["volumeMounts"]] == ["/models", "/tmp"]
    probes = {kind: server[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {server["ports"][0]["name"]}
    assert server["ports"][0]["containerPort"] == int(IMAGE["EXPOSE"])
    assert list(server["lifecycle"]["preStop"]) == ["sleep"]
    plan = {
        "command": [*json.loads(IMAGE["ENTRYPOINT"]), *server["args"]],
        "health": None,  # the kubelet ignores the image's
        "startup": probes["startup"]["path"],
        "ready": probes["readiness"]["path"],
        "live": probes["liveness"]["path"],
        "pre_stop_s": 0.5,
        "notice": notice,
        **{"key": "secret", "model": "smollm2-135m-instruct"},
    }
    assert run_in_sandbox(plan, image_environment(IMAGE) | server["env"], model_path.parent.parent) == EXPECTED


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (Debian: redis-server)")
def test_the_redis_of_compose(tmp_path: Path) -> None:
    """It forgets what is old instead of refusing what is new, and writes nothing."""
    command = compose_service("redis")["command"]
    port = free_port()
    process = subprocess.Popen([*command, "--port", str(port), "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, retry=Retry(ConstantBackoff(0.05), 200)) as client:
            assert client.ping()
            settings = client.config_get("maxmemory*") | client.config_get("save") | client.config_get("appendonly")
    finally:
        process.terminate()
        process.wait(20)
    assert settings["maxmemory"] == str(512 << 20)
    assert settings["maxmemory-policy"] == "allkeys-lru"
    assert (settings["save"], settings["appendonly"]) == ("", "no")
    assert list(tmp_path.iterdir()) == []


def test_the_job_that_pulls_the_model(model_path: Path) -> None:
    """Repeated on a volume that has the model, it downloads nothing."""
    container = containers(documents("base"))["pull"]
    plan = {"job": container["command"]}
    found: Any = run_in_sandbox(plan, image_environment(IMAGE) | container["env"], model_path.parent.parent)
    assert found == {"exit code": 0, "output": "/models/models/SmolLM2-135M-Instruct.Q4_1.gguf"}
