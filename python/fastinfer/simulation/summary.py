"""Summary of a simulation: latencies, throughput, hit rate, preemptions and price."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastinfer.simulation.fleet import Simulation

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and percentiles (nearest rank) in seconds; all ``None`` if there are no samples."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Latency":
        """Summarise samples in seconds."""
        if not samples:
            return cls(None, None, None, None)
        return cls(float(np.mean(samples)), *(float(p) for p in _percentiles(samples)))


def _percentiles(samples: Sequence[float]) -> np.ndarray:
    values: np.ndarray = np.percentile(samples, PERCENTILES, method="inverted_cdf")
    return values


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a simulated trace.

    Attributes:
        replicas: number of replicas.
        requests: number of requests, all of which have ended.
        prompt_tokens, output_tokens: tokens of their prompts and outputs.
        seconds: time from the first arrival to the last end.
        tokens_per_s: output tokens divided by this time.
        requests_per_s: requests divided by this time.
        queue_s: time from a request's arrival to the beginning of the first step that computes some of it.
        ttft_s: time to the first token, the queue included.
        tpot_s: mean time per output token of a request after the first, of requests with several.
        hit_rate: share of the admitted tokens that the prefix caches held.
        preemptions: number of preemptions.
        busy: share of the time in which a replica computed, on average.
        load_skew: requests of the replica with the most, divided by the mean.
        price_per_million: price of a million output tokens; ``None`` without a price.
    """

    replicas: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    queue_s: Latency
    ttft_s: Latency
    tpot_s: Latency
    hit_rate: float
    preemptions: int
    busy: float
    load_skew: float
    price_per_million: float | None

    @classmethod
    def of(cls, simulation: Simulation, price_per_hour: float | None = None) -> "Summary":
        """Summarise a simulation.

        Args:
            simulation: the simulation, of at least one request.
            price_per_hour: price of one replica per hour, from the first arrival to the last end.
        """
        records, replicas, seconds = simulation.records, simulation.replicas, simulation.seconds
        managers = [replica.block_manager for replica in replicas]
        output_tokens = sum(record.request.output_tokens for record in records)
        counts = np.bincount([record.replica for record in records], minlength=len(replicas))
        hits = sum(manager.num_hit_tokens for manager in managers)
        price = None
        if price_per_hour is not None:
            price = price_per_hour * len(replicas) * seconds / 3600 / output_tokens * 1e6
        return cls(
            replicas=len(replicas),
            requests=len(records),
            prompt_tokens=sum(record.request.prompt_tokens for record in records),
            output_tokens=output_tokens,
            seconds=seconds,
            tokens_per_s=output_tokens / seconds,
            requests_per_s=len(records) / seconds,
            queue_s=Latency.of([record.first_scheduled_s - record.request.arrival_s for record in records]),
            ttft_s=Latency.of([record.ttft_s for record in records]),
            tpot_s=Latency.of([tpot for record in records if (tpot := record.tpot_s) is not None]),
            hit_rate=hits / sum(manager.num_queried_tokens for manager in managers),
            preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
            busy=sum(replica.busy_s for replica in replicas) / (seconds * len(replicas)),
            load_skew=float(counts.max() / counts.mean()),
            price_per_million=price,
        )

    def rows(self) -> list[list[str]]:
        """Return the table of latencies, with its head."""
        rows = [["ms", "mean", "p50", "p95", "p99"]]
        for name, latency in (("queue", self.queue_s), ("TTFT", self.ttft_s), ("TPOT", self.tpot_s)):
            values = (latency.mean, latency.p50, latency.p95, latency.p99)
            rows.append([name, *("-" if value is None else f"{value * 1e3:.2f}" for value in values)])
        return rows

    def lines(self) -> list[str]:
        """Return the other figures as lines of text."""
        plural = "" if self.replicas == 1 else "s"
        lines = [
            f"{self.requests} requests on {self.replicas} replica{plural} in {self.seconds:.2f} s: "
            f"{self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens",
            f"{self.tokens_per_s:.1f} output tokens/s, {self.requests_per_s:.2f} requests/s, busy {self.busy:.1%}",
            f"prefix hits {self.hit_rate:.1%}, preemptions {self.preemptions}, load skew {self.load_skew:.2f}",
        ]
        if self.price_per_million is not None:
            lines.append(f"{self.price_per_million:.4g} per million output tokens")
        return lines
