"""A real Prometheus scrapes a server: it accepts the metrics, the alert rules and every query of the dashboard."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.dashboard import dashboard_queries
from support.paths import ROOT
from support.toy import ToyModel
from support.toy_server import NAME, toy_server

yaml = pytest.importorskip("yaml", reason="needs pyyaml")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs prometheus (Debian: apt-get install prometheus)"
    ),
]

DEPLOY = ROOT / "deploy"
PROMPT = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 12, "ignore_eos": True}


class Prometheus:
    """A Prometheus on a free port, with the project's rules, that scrapes one server."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._http = httpx.Client(base_url=f"http://{address}", timeout=10)
        config = {
            "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
            "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
            "scrape_configs": [{"job_name": "fastinfer", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        self._log = folder / "log"
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Wait until queries are answered: before that, they are refused with 503."""
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/-/ready").status_code == 200:
                    return
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def value(self, query: str) -> list[Any]:
        """The series of an instant query."""
        found: list[Any] = self.get("query", query=query)["result"]
        return found

    def until(self, query: str) -> list[Any]:
        """Wait until a query has series."""
        deadline = time.monotonic() + 30
        while True:
            if found := self.value(query):
                return found
            assert time.monotonic() < deadline, query
            time.sleep(0.1)


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[tuple[ToyModel, str, Prometheus]]:
    model = ToyModel()
    with toy_server(model, response_cache="memory") as (_, address):
        prometheus = Prometheus(tmp_path, address.removeprefix("http://"))
        try:
            yield model, address, prometheus
        finally:
            prometheus.process.kill()
            prometheus.process.wait()


def test_metrics_rules_and_queries(scraped: tuple[ToyModel, str, Prometheus]) -> None:
    _, address, prometheus = scraped
    # A counter's rate needs a value from before.
    ask(address, PROMPT)
    prometheus.until('vllm:request_success_total{finished_reason="length"}')
    for i in range(3):
        ask(address, {**PROMPT, "prompt": [i] * 20})
        ask(address, PROMPT)
    [target] = prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    prometheus.until('rate(vllm:request_success_total{finished_reason="length"}[1m]) > 0')
    prometheus.until("rate(vllm:iteration_tokens_total_count[1m]) > 0")

    [hits] = prometheus.until('vllm:response_cache_requests_total{result="hit"} > 2')
    assert hits["metric"].items() >= {"model_name": NAME, "engine": "0", "job": "fastinfer"}.items()

    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    expected = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in expected]
    deadline = time.monotonic() + 30
    while any(rule["health"] == "unknown" for rule in rules):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [(rule["name"], rule["health"], rule["state"]) for rule in rules] == [
        (rule["name"], "ok", "inactive") for rule in rules
    ]

    queries = list(dashboard_queries())
    assert len(queries) > 20
    # Nothing has been refused.
    assert [query for query in queries if not prometheus.value(query) and "rejections" not in query] == []


def test_an_alert_comes_to_be_pending(scraped: tuple[ToyModel, str, Prometheus]) -> None:
    """Requests that fail in the engine are noticed by the rule on them, and by the one on errors of HTTP."""
    model, address, prometheus = scraped
    prometheus.until("up == 1")
    model.fail = True
    ask(address, PROMPT, status=500)
    prometheus.until('vllm:request_success_total{finished_reason="error"}')
    ask(address, PROMPT, status=500)
    for alert in ("FastinferRequestsFail", "FastinferServerErrors"):
        prometheus.until(f'ALERTS{{alertname="{alert}", alertstate="pending"}}')


def ask(address: str, body: dict[str, Any], status: int = 200) -> None:
    for stream in (False, True):
        answer = httpx.post(f"{address}/v1/completions", json={**body, "stream": stream}, timeout=30)
        assert answer.status_code == status, answer.text
