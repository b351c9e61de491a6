"""Simulated engines: what a trace must give, whatever its lengths and arrivals."""

import math
import random
from collections.abc import Iterator

import pytest

from fastinfer.engine.scheduler import LOOKAHEAD
from fastinfer.errors import RequestError
from fastinfer.simulation.cost_file import CostFile, EngineLimits
from fastinfer.simulation.fleet import Simulation, simulate
from fastinfer.simulation.generator import Lengths, generate_trace
from fastinfer.simulation.replica import Record, Replica
from fastinfer.simulation.routing import ROUTINGS, RoundRobin, make_routing
from fastinfer.simulation.step_cost import StepCost
from fastinfer.simulation.summary import Summary
from fastinfer.simulation.trace import TraceRequest

COST = StepCost(
    step=3e-3, decode_sequence=1.1e-3, prompt_sequence=5e-3, prompt_token=1e-3, decode_context=3e-6, prompt_context=8e-7
)


def costs(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 16,
    cost: StepCost = COST,
    caches: bool = True,
    window: int = 0,
) -> CostFile:
    limits = EngineLimits(max_num_seqs, budget, 200, block_size, (num_blocks,), (window,), caches)
    return CostFile("assumed", "toy", cost, limits)


def run(trace: list[TraceRequest], file: CostFile, num_replicas: int = 1) -> Simulation:
    return simulate(trace, file, RoundRobin(num_replicas))


def chunk_seconds(start: int, count: int) -> float:
    """The formula for a step that computes one chunk alone."""
    if count == 1:
        return COST.step + COST.decode_sequence + COST.decode_context * (start + 1)
    pairs = count * start + count * (count + 1) // 2
    return COST.step + COST.prompt_sequence + COST.prompt_token * count + COST.prompt_context * pairs


def moments(prompt: int, output: int, budget: int, start: float, cached: int = 0) -> Iterator[float]:
    """The times of the tokens of a request alone."""
    now, computed = start, cached
    while computed < prompt:
        count = min(budget, prompt - computed)
        now += chunk_seconds(computed, count)
        computed += count
    yield now
    for length in range(prompt, prompt + output - 1):
        now += chunk_seconds(length, 1)
        yield now


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (16, 1), (17, 5), (40, 9), (150, 50)])
def test_one_request_takes_what_the_formula_says(prompt: int, output: int) -> None:
    simulation = run([TraceRequest(2.5, prompt, output)], costs())
    [record] = simulation.records
    times = list(moments(prompt, output, 16, 2.5))
    assert len(times) == output
    assert (record.first_scheduled_s, record.first_token_s, record.end_s) == (2.5, times[0], times[-1])
    assert simulation.seconds == times[-1] - 2.5
    assert record.ttft_s == times[0] - 2.5
    assert record.tpot_s == (None if output == 1 else (times[-1] - times[0]) / (output - 1))


def test_a_prefix_is_computed_once() -> None:
    trace = [TraceRequest(0.0, 30, 2, "a", 22), TraceRequest(9.0, 50, 3, "a", 25), TraceRequest(18.0, 30, 3, "b", 22)]
    simulation = run(trace, costs())
    # Of the first prompt five full blocks of the prefix are shared; then its own tokens begin.
    for record, cached in zip(simulation.records, (0, 20, 0), strict=True):
        times = list(
            moments(record.request.prompt_tokens, record.request.output_tokens, 16, record.request.arrival_s, cached)
        )
        assert record.first_token_s == pytest.approx(times[0], rel=1e-12)
    assert simulation.replicas[0].block_manager.num_hit_tokens == 20
    assert run(trace, costs(caches=False)).replicas[0].block_manager.num_hit_tokens == 0


def test_a_prefix_is_not_found_in_generated_text() -> None:
    """The first prompt is all prefix, so what follows its 16 tokens is generated, and not the rest of the prefix."""
    trace = [TraceRequest(0.0, 16, 30, "a", 16), TraceRequest(900.0, 50, 3, "a", 40)]
    assert run(trace, costs()).replicas[0].block_manager.num_hit_tokens == 16


def test_a_queued_request_has_no_tokens_yet() -> None:
    """The scheduler looks at some that wait; the memory of the others would grow with the queue."""
    replica = Replica(costs(), lambda: 0.0)
    for number in range(1000):
        replica.add(Record(TraceRequest(0.0, 5, 3), 0), number, [])
    replica.begin_step()
    assert len(replica.scheduler.waiting) + len(replica.scheduler.running) == LOOKAHEAD


@pytest.mark.parametrize(
    ("requests", "num_hits"),
    [
        ([(30, None, 0), (30, None, 0)], 0),  # what is no prefix is of the request alone
        ([(30, "a", 22), (30, "a", 22)], 20),
        ([(50, "a", 25), (50, "a", 25), (50, "a", 8)], 24 + 8),
    ],
)
def test_requests_share_their_prefixes_alone(requests: list[tuple[int, str | None, int]], num_hits: int) -> None:
    trace = [
        TraceRequest(9.0 * number, prompt, 1, prefix, prefix_tokens)
        for number, (prompt, prefix, prefix_tokens) in enumerate(requests)
    ]
    assert run(trace, costs()).replicas[0].block_manager.num_hit_tokens == num_hits


def test_a_prefix_is_found_while_its_prompt_is_computed() -> None:
    trace = [TraceRequest(0.0, 100, 1, "a", 40), TraceRequest(0.001, 60, 1, "a", 40)]
    assert run(trace, costs()).replicas[0].block_manager.num_hit_tokens == 16  # the first step's


def test_requests_that_arrive_together_share_the_first_step() -> None:
    records = run([TraceRequest(1.0, 4, 2), TraceRequest(1.0, 4, 2)], costs()).records
    assert records[0].first_token_s == records[1].first_token_s
    expected = COST.step + 8 * COST.prompt_token + 2 * COST.prompt_sequence + 20 * COST.prompt_context
    assert records[0].ttft_s == pytest.approx(expected, rel=1e-12)


def test_a_request_waits_for_the_step_that_is_being_computed() -> None:
    first, second = run([TraceRequest(0.0, 16, 1), TraceRequest(0.001, 4, 1)], costs()).records
    assert second.first_scheduled_s == first.first_token_s


@pytest.mark.parametrize("seed", range(40))
def test_random_traces_lose_nothing(seed: int) -> None:
    """All requests end, no token is lost or made twice, and no block stays used."""
    rng = random.Random(seed)
    prefixes = rng.choice([0, 3])
    trace = generate_trace(
        rng.randrange(1, 60),
        rng.choice([None, 1.0, 50.0]),
        Lengths(1, rng.choice([5, 60])),
        Lengths(1, rng.choice([1, 30])),
        num_prefixes=prefixes,
        prefix_tokens=rng.choice([7, 40]) if prefixes else 0,
        seed=seed,
    )
    block_size, window = rng.choice([1, 4, 16]), rng.choice([0, 0, 9])
    num_blocks = rng.choice([math.ceil(200 / block_size) + 1, 400])
    file = costs(num_blocks, block_size, rng.choice([1, 3, 8]), rng.choice([2, 16, 64]), window=window)
    num_replicas = rng.choice([1, 2, 5])
    routing = make_routing(rng.choice(ROUTINGS), num_replicas, 1.0)
    simulation = simulate(trace, file, routing)
    assert abs(routing.loads).max() < 1e-9
    assert sorted(record.request.arrival_s for record in simulation.records) == [r.arrival_s for r in trace]
    for record in simulation.records:
        assert record.request.arrival_s <= record.first_scheduled_s < record.first_token_s <= record.end_s
    generated = sum(replica.num_generated_tokens for replica in simulation.replicas)
    assert generated == sum(request.output_tokens for request in trace)
    hits = sum(replica.block_manager.num_hit_tokens for replica in simulation.replicas)
    computed = sum(replica.num_prompt_tokens for replica in simulation.replicas)
    num_preemptions = sum(replica.scheduler.num_preemptions for replica in simulation.replicas)
    if not num_preemptions:
        assert computed + hits == sum(request.prompt_tokens for request in trace)
    for replica in simulation.replicas:
        manager = replica.block_manager
        assert manager.num_used == 0
        assert manager.num_free + manager.num_cached == manager.num_blocks
        assert not replica.scheduler.running
        assert not replica.scheduler.waiting
        assert not replica.is_busy


def test_a_full_cache_preempts() -> None:
    trace = [TraceRequest(0.0, 20, 100) for _ in range(6)]
    file = costs(num_blocks=60, budget=64)
    summary = Summary.of(run(trace, file))
    assert summary.preemptions > 0
    assert summary.output_tokens == 600


def test_the_same_trace_gives_the_same_figures() -> None:
    def figures() -> tuple[Summary, list[tuple[int, float, float]]]:
        trace = generate_trace(80, 30.0, Lengths(4, 60), Lengths(1, 20), num_prefixes=4, prefix_tokens=30, seed=5)
        simulation = simulate(trace, costs(), make_routing("prefix-affinity", 4, 1.0))
        return Summary.of(simulation, 2.0), [(r.replica, r.first_token_s, r.end_s) for r in simulation.records]

    assert figures() == figures()


def test_twice_the_replicas_serve_twice_the_requests() -> None:
    def summary(num_replicas: int) -> Summary:
        trace = [TraceRequest(0.0, 8, 10)] * (40 * num_replicas)
        return Summary.of(run(trace, costs(), num_replicas), 3.6)

    one, four = summary(1), summary(4)
    assert four.seconds == one.seconds
    assert four.tokens_per_s == 4 * one.tokens_per_s
    assert four.price_per_million == one.price_per_million == pytest.approx(3.6 / 3600 * one.seconds / 400 * 1e6)


def test_the_summary_counts_what_happened() -> None:
    trace = [TraceRequest(1.0, 16, 3), TraceRequest(1.0, 16, 1), TraceRequest(500.0, 16, 2)]
    simulation = run(trace, costs(), 2)
    summary = Summary.of(simulation)
    assert (summary.requests, summary.prompt_tokens, summary.output_tokens) == (3, 48, 6)
    assert summary.seconds == pytest.approx(499, abs=1)
    assert summary.busy == pytest.approx(sum(r.busy_s for r in simulation.replicas) / (2 * summary.seconds))
    assert summary.load_skew == pytest.approx(2 / 1.5)
    assert Summary.of(run(trace, costs(), 4)).load_skew == pytest.approx(1 / 0.75), "one replica has none"
    assert (summary.queue_s.mean, summary.queue_s.p99) == (0.0, 0.0)
    ttfts = sorted(record.ttft_s for record in simulation.records)
    assert (summary.ttft_s.p50, summary.ttft_s.p99) == (ttfts[1], ttfts[2])
    assert summary.tpot_s.mean == pytest.approx(sum(r.tpot_s for r in simulation.records if r.tpot_s) / 2)
    assert summary.price_per_million is None
    assert [row[0] for row in summary.rows()] == ["ms", "queue", "TTFT", "TPOT"]


def test_without_second_tokens_there_is_no_time_between_tokens() -> None:
    summary = Summary.of(run([TraceRequest(0.0, 5, 1)], costs()))
    assert summary.tpot_s.mean is None
    assert summary.rows()[-1] == ["TPOT", "-", "-", "-", "-"]


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(RequestError, match="max_model_len=200 tokens together, got 190 and 11"):
        run([TraceRequest(0.0, 190, 11)], costs())
    with pytest.raises(RequestError, match=r"num_blocks must be at least \[50\] for max_model_len=200, got \[49\]"):
        run([TraceRequest(0.0, 1, 1)], costs(num_blocks=49))
