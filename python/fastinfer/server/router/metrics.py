"""Metrics of the router: requests, retries and cached prefixes, and the load of each replica."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastinfer.server.record import RequestRecord
from fastinfer.server.router.host import RouterHost
from fastinfer.server.router.replica import Replica

PREFIX = "fastinfer_router"


class RouterMetrics:
    """All metrics of one router, in a registry of their own.

    Args:
        host: the replicas.
    """

    def __init__(self, host: RouterHost) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that were sent to a replica.", "replica")
        self._retries = self._counter("retries", "Requests that went to another replica, by reason.", "reason")
        self._prefills = Counter(
            f"{PREFIX}_prefills",
            "Prompts that a prefill server was to compute first, by the status of its answer, error or timeout.",
            ("server", "status"),
            registry=self._registry,
        )
        self._prompt_bytes = self._counter("prompt_bytes", "Bytes of prompts that were sent.", "replica")
        self._matched_bytes = self._counter("matched_bytes", "Bytes of these that the replica had seen.", "replica")
        self._http_requests = Counter(
            "http_requests", "Answered HTTP requests.", ("method", "handler", "status"), registry=self._registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds", "Time of an HTTP request.", ("handler",), registry=self._registry
        )
        self._registry.register(_ReplicaCollector(host))

    def answered(self, record: RequestRecord) -> None:
        """Count an HTTP request."""
        self._http_requests.labels(record.method, record.path, str(record.status)).inc()
        self._http_duration.labels(record.path).observe(record.seconds)

    def sent(self, replica: Replica, num_bytes: int, num_matched: int) -> None:
        """Count a request that is sent to a replica, and how much of its prompt the replica has seen."""
        self._requests.labels(replica.name).inc()
        self._prompt_bytes.labels(replica.name).inc(num_bytes)
        self._matched_bytes.labels(replica.name).inc(num_matched)

    def retried(self, reason: str) -> None:
        """Count a request that another replica takes: ``"refused"``, ``"lost"`` or, in mid-stream, ``"continued"``."""
        self._retries.labels(reason).inc()

    def prefilled(self, server: Replica, status: str) -> None:
        """Count a prompt that a prefill server was to compute: a status of HTTP, ``"error"`` or ``"timeout"``."""
        self._prefills.labels(server.name, status).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        text: bytes = generate_latest(self._registry)
        return text

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, (label,), registry=self._registry)


class _ReplicaCollector(Collector):
    """Reads the state of the replicas when Prometheus asks for it."""

    def __init__(self, host: RouterHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(f"{PREFIX}_requests_running", "Requests of the router there.", labels=["replica"])
        load = GaugeMetricFamily(f"{PREFIX}_load", "Their load, see --beta.", labels=["replica"])
        ready = GaugeMetricFamily(f"{PREFIX}_replica_ready", "Whether it gets requests.", labels=["replica"])
        blocks = GaugeMetricFamily(f"{PREFIX}_index_blocks", "Remembered blocks of prompts.", labels=["replica"])
        for replica in self._host.servers:
            running.add_metric([replica.name], replica.num_running)
            load.add_metric([replica.name], replica.load)
            ready.add_metric([replica.name], float(replica.is_ready))
            blocks.add_metric([replica.name], len(replica.prefixes))
        yield from (running, load, ready, blocks)
