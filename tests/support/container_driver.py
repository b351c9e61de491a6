"""Runs inside the sandbox of support/container.py: plays docker and the kubelet for one life of a server.

The plan is JSON in the first argument: ``command`` starts the server; ``health`` is the image's health command or null;
``startup``, ``ready`` and ``live`` are the paths of the probes; ``pre_stop_s`` passes before SIGTERM; ``notice`` is the
cloud provider that gives notice before it, or null; ``key`` is the API key; ``model`` the name for requests.
A plan with ``job`` runs that command alone. What was found is printed as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from fake_metadata import FakeMetadata

ADDRESS = "http://127.0.0.1:8000"


def get(path: str) -> int:
    """Return the status of a probe; 0 if nobody listens."""
    try:
        with urllib.request.urlopen(ADDRESS + path, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def until(condition: Any, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


def post(plan: dict[str, Any], **fields: Any) -> Any:
    body = {"model": plan["model"], "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {plan['key']}"}
    request = urllib.request.Request(f"{ADDRESS}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def can_write(folder: str) -> bool:
    try:
        (Path(folder) / "probe").write_text("x")
    except OSError:
        return False
    return True


def main(plan: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_healthy() -> bool:
        return plan["health"] is None or subprocess.run(plan["health"], capture_output=True).returncode == 0

    metadata, command = FakeMetadata(), list(plan["command"])
    if plan["notice"] is not None:
        command += ["--spot-notice", plan["notice"], "--metadata-url", metadata.url]
    server = subprocess.Popen(command)
    until(lambda: get(plan["live"]) == 200, "the server listens")
    found["healthy"] = is_healthy()
    until(lambda: get(plan["startup"]) == 200, "the server is ready")
    found["ready"] = get(plan["ready"])
    status = Path(f"/proc/{server.pid}/status").read_text()
    found["rights"] = [line.split()[-1] for line in status.splitlines() if line.startswith("CapEff")]
    found["uid"] = os.getuid()
    found["writable"] = [folder for folder in ("/", "/models", sys.prefix, "/tmp") if can_write(folder)]

    lines: list[str] = []
    with post(plan, stream=True, max_tokens=200) as stream:
        lines.append(stream.readline().decode())
        reader = threading.Thread(target=lambda: lines.extend(line.decode() for line in stream))
        reader.start()
        time.sleep(plan["pre_stop_s"])
        found["served during preStop"] = post(plan, max_tokens=2).status
        if plan["notice"] is None:
            server.send_signal(signal.SIGTERM)
        else:
            metadata.is_noticed = True
        until(lambda: get(plan["ready"]) in (503, 0), "readiness fails")
        found["draining"] = [get(plan["ready"]), get(plan["live"]), is_healthy()]
        reader.join(60)
    found["end of the stream"] = "".join(lines).strip().rpartition("\n")[2]
    found["error"] = any('"error"' in line for line in lines)
    if plan["notice"] is not None:
        server.send_signal(signal.SIGTERM)
    found["exit code"] = server.wait(30)
    return found


def run_job(command: list[str]) -> dict[str, Any]:
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return {"exit code": result.returncode, "output": result.stdout.strip()}


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    print(json.dumps(run_job(plan["job"]) if "job" in plan else main(plan)))
