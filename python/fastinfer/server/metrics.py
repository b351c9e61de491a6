"""Metrics under vLLM's names, labels and buckets, so that its dashboards, gateways and autoscalers work."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from fastinfer.async_engine import AsyncEngine
from fastinfer.engine.stats import StepStats
from fastinfer.outputs import RequestMetrics
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.cache.store import StoreStats
from fastinfer.server.collectors import LABELS, EngineCollector, StoreCollector
from fastinfer.server.record import RequestRecord

TTFT_BUCKETS = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0]
TTFT_BUCKETS += [80.0, 160.0, 640.0, 2560.0]
# vLLM's, with three finer ones: a small model takes less than 10 ms per token.
ITL_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
ITL_BUCKETS += [10.0, 20.0, 40.0, 80.0]
LATENCY_BUCKETS = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0]
LATENCY_BUCKETS += [480.0, 960.0, 1920.0, 7680.0]
STEP_BUCKETS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
ENGINE = "0"  # vLLM numbers the engines behind one server; here there is one


def one_two_five(limit: int) -> list[int]:
    """Return the buckets 1, 2, 5, 10, 20, ... up to a limit."""
    return [digit * 10**power for power in range(8) for digit in (1, 2, 5) if digit * 10**power <= limit]


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        prefix: prefix of the names, without the colon.
        model_name: value of the label of the same name.

    Attributes:
        registry: the registry.
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._labels = prefix, (model_name, ENGINE)
        histogram = self._histogram
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS)
        self._time_per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a request.", ITL_BUCKETS
        )
        self._latency = histogram("e2e_request_latency_seconds", "Time of a request.", LATENCY_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Time before the first step.", LATENCY_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "Time in prefill.", LATENCY_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "Time in decode.", LATENCY_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "Time after the queue.", LATENCY_BUCKETS)
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", one_two_five(200_000))
        self._tokens = histogram("request_generation_tokens", "Generated tokens of a request.", one_two_five(200_000))
        self._n = histogram("request_params_n", "The parameter n.", one_two_five(128))
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", one_two_five(200_000))
        self._step_tokens = histogram("iteration_tokens_total", "Tokens of a step.", STEP_BUCKETS)
        self._success = self._counter("request_success", "Finished requests.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Refused requests.", "reason")
        self._cache = self._counter("response_cache_requests", "Requests by what the response cache did.", "result")
        self._http_requests = Counter(
            "http_requests", "Answered HTTP requests.", ("method", "handler", "status"), registry=self.registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds", "Time of an HTTP request.", ("handler",), registry=self.registry
        )

    def watch(self, engine: AsyncEngine) -> None:
        """Begin to report an engine's load."""
        engine.on_step(self._count_step)
        self.registry.register(EngineCollector(engine, self._prefix, self._labels))

    def watch_stores(self, stats: Sequence[StoreStats]) -> None:
        """Begin to report what the stores of the response cache have done."""
        self.registry.register(StoreCollector(stats, self._prefix, self._labels))

    def answered(self, record: RequestRecord) -> None:
        """Count an HTTP request."""
        self._http_requests.labels(record.method, record.path, str(record.status)).inc()
        self._http_duration.labels(record.path).observe(record.seconds)

    def reject(self, reason: str) -> None:
        """Count a request that was refused for lack of room."""
        self._rejections.labels(*self._labels, reason).inc()

    def count_cache(self, result: str) -> None:
        """Count a request by what the response cache did: ``"hit"``, ``"semantic"``, ``"miss"`` or ``"bypass"``."""
        self._cache.labels(*self._labels, result).inc()

    def finish(
        self, times: RequestMetrics, params: SamplingParams, num_prompt_tokens: int, num_tokens: int, reasons: set[str]
    ) -> None:
        """Count a finished request.

        Args:
            times: when it arrived, began and ended.
            params: its parameters.
            num_prompt_tokens, num_tokens: numbers of its tokens.
            reasons: the reasons why its completions ended.
        """
        self._prompt_tokens.observe(num_prompt_tokens)
        self._tokens.observe(num_tokens)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        for reason in reasons:
            self._success.labels(*self._labels, reason).inc()
        end = times.finish_time
        if end is None:
            return
        self._latency.observe(end - times.arrival_time)
        begin, first = times.first_scheduled_time, times.first_token_time
        if begin is None or first is None:
            return
        self._queue.observe(begin - times.arrival_time)
        self._inference.observe(end - begin)
        self._prefill.observe(first - begin)
        self._decode.observe(end - first)
        self.time_to_first_token.observe(first - times.arrival_time)
        if num_tokens > params.n:
            self._time_per_token.observe((end - first) * params.n / (num_tokens - params.n))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        text: bytes = generate_latest(self.registry)
        return text

    def _count_step(self, step: StepStats) -> None:
        self._step_tokens.observe(step.num_tokens)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"{self._prefix}:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._labels)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, (*LABELS, label), registry=self.registry)
