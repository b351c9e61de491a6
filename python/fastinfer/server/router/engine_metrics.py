"""Metrics of local replicas, which nobody else can ask for, under a label with the replica's name."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# The router has metrics of the same names about the requests of clients.
OF_THE_ROUTER = ("http_requests", "http_request_duration_seconds")


def joined_metrics(texts: Mapping[str, str]) -> bytes:
    """Return metrics of several replicas in Prometheus' format, each under the label ``replica``.

    Args:
        texts: the metrics of each replica by its name, in the same format.
    """
    registry = CollectorRegistry()
    registry.register(_Joined(texts))
    text: bytes = generate_latest(registry)
    return text


class _Joined(Collector):
    """Gives each metric once, with the samples of all replicas."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for metric in text_string_to_metric_families(text):
                if metric.name.removesuffix("_created") in OF_THE_ROUTER:
                    continue
                joined = metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        yield from metrics.values()
