"""Metrics that are read from other objects when Prometheus asks for them."""

import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fastinfer.async_engine import AsyncEngine
from fastinfer.server.cache.store import StoreStats

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reads an engine's statistics when Prometheus asks for them.

    Args:
        engine: the engine.
        prefix: prefix of the names, without the colon.
        labels: values of the labels.
    """

    def __init__(self, engine: AsyncEngine, prefix: str, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats, config = self._engine.stats(), self._engine.config
        num_blocks = stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
        gauges = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.num_used_blocks / max(num_blocks, 1),
            "engine_sleep_state": float(stats.is_sleeping),
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", name.replace("_", " "), labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        if config.max_loras:
            yield self._adapters()
        counters = {
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_generated_tokens,
            "prompt_tokens_cached": stats.num_hit_tokens,
            "prefix_cache_queries": stats.num_queried_tokens,
            "prefix_cache_hits": stats.num_hit_tokens,
            "num_preemptions": stats.num_preemptions,
            "num_waited_steps": stats.num_waited_steps,
            "spec_decode_num_drafts": stats.num_draft_rounds,
            "spec_decode_num_draft_tokens": stats.num_drafted_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        }
        yield from counter_families(counters, self._prefix, self._labels)
        info = InfoMetricFamily(f"{self._prefix}:cache_config", "the KV cache", labels=LABELS)
        info.add_metric(
            self._labels,
            {
                "block_size": str(config.block_size),
                "num_gpu_blocks": str(num_blocks),
                "enable_prefix_caching": str(config.enable_prefix_caching),
            },
        )
        yield info

    def _adapters(self) -> Metric:
        """Return which LoRA adapters are in use, as gateways read it: in labels, with the present time as value."""
        running, waiting = self._engine.adapters_in_use()
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        gauge = GaugeMetricFamily(f"{self._prefix}:lora_requests_info", "the LoRA adapters in use", labels=labels)
        gauge.add_metric((str(self._engine.config.max_loras), ",".join(running), ",".join(waiting)), time.time())
        return gauge


class StoreCollector(Collector):
    """Reads what the stores of the response cache have done together.

    Args:
        stats: statistics of each store.
        prefix: prefix of the names, without the colon.
        labels: values of the labels.
    """

    def __init__(self, stats: Sequence[StoreStats], prefix: str, labels: tuple[str, str]) -> None:
        self._stats = stats
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        counters = {
            "response_cache_errors": sum(each.errors for each in self._stats),
            "response_cache_evictions": sum(each.evictions for each in self._stats),
        }
        yield from counter_families(counters, self._prefix, self._labels)


def counter_families(values: Mapping[str, int], prefix: str, labels: tuple[str, str]) -> Iterator[Metric]:
    """Yield a counter for each name."""
    for name, value in values.items():
        counter = CounterMetricFamily(f"{prefix}:{name}", name.replace("_", " "), labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
