"""Accuracy of ``fastinfer simulate``: held-out traces on the real engine, and the same traces simulated.

The costs of steps are fitted to other requests, those of ``fastinfer bench step-cost``. These and the traces run in
turns, each time with new prompts of the same lengths. With ``--clock process`` all times are CPU time of this process,
in one thread. On a machine that other programs use, too, that leaves out the time in which they have the core, but not
what shared caches cost. While the engine is idle, the clock is set to the next arrival.

    python bench/bench_simulator.py --clock process --out bench/results
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fastinfer import LLM, SamplingParams
from fastinfer.benchmarks import replay as replay_module
from fastinfer.benchmarks.replay import Job, Replay, replay
from fastinfer.benchmarks.report import percentile, write_json
from fastinfer.benchmarks.step_cost import StepTimes, limits_of, run_pass
from fastinfer.engine import step as step_module
from fastinfer.engine.engine import Engine
from fastinfer.simulation.cost_file import CostFile
from fastinfer.simulation.fit import fit
from fastinfer.simulation.fleet import simulate
from fastinfer.simulation.generator import Lengths, generate_trace
from fastinfer.simulation.routing import RoundRobin
from fastinfer.simulation.summary import Summary
from fastinfer.simulation.trace import TraceRequest
from fastinfer.utils.table import format_table
from fastinfer.utils.torch_threads import set_num_threads

# What is compared, and the error that is allowed.
FIGURES = {"tokens/s": 0.05, "TPOT mean": 0.05, "TTFT p50": 0.10}


class SkippingClock:
    """Stands in for the module ``time`` in the engine's steps and in replays; goes on while somebody sleeps."""

    def __init__(self, base: Callable[[], float]) -> None:
        self._base, self._skipped = base, 0.0

    def perf_counter(self) -> float:
        return self._base() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for simulator.json")
    args = parser.parse_args()
    set_num_threads(args.threads)
    clock = SkippingClock(time.perf_counter if args.clock == "wall" else time.process_time)
    step_module.time = replay_module.time = clock  # type: ignore[assignment, attr-defined]
    engine = LLM(args.model, max_num_seqs=args.max_num_seqs, max_model_len=2048).engine
    times, rng = StepTimes(), random.Random(0)
    run_pass(engine, rng)  # a warm-up
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in TRACES}
    for number in range(
        args.repeats
    ):  # in turns, so that a busy minute affects both what is fitted and what is compared
        engine.on_step = times
        run_pass(engine, rng)
        engine.on_step = None
        for name, make_trace in TRACES.items():
            engine.block_manager.reset_prefix_cache()
            hits = engine.block_manager.num_hit_tokens
            run = figures_of(replay(engine, jobs_of(make_trace(number), engine, rng)))
            runs[name].append(run | {"hit tokens": engine.block_manager.num_hit_tokens - hits})
    fitted = fit(times.samples)
    costs = CostFile("measured", args.model, fitted.cost, limits_of(engine))
    print(f"{fitted.num_steps} steps, median error {fitted.median_error:.1%}", costs.as_dict()["seconds"])
    results = {}
    for name, make_trace in TRACES.items():
        simulated = [simulated_figures(make_trace(number), costs) for number in range(args.repeats)]
        results[name] = {"engine": runs[name], "simulated": simulated}
        print(f"\n{name}: {len(make_trace(0))} requests\n{format_table(rows(runs[name], simulated))}", flush=True)
    if args.out is not None:
        settings = {name: getattr(args, name) for name in ("clock", "threads", "max_num_seqs", "repeats")}
        facts = {"num_steps": fitted.num_steps, "median_error": fitted.median_error}
        measured = {"settings": settings, "costs": costs.as_dict(), "fit": facts, "traces": results}
        print(write_json(args.out / "simulator.json", measured))
    return 0


def trace_maker(
    num_requests: int, rate: float | None, prompts: Lengths, outputs: Lengths, **prefixes: int
) -> Callable[[int], list[TraceRequest]]:
    """Return a function from a number to a trace, so that each repeat has lengths and arrivals of its own."""
    return lambda number: generate_trace(num_requests, rate, prompts, outputs, seed=number, **prefixes)


TRACES = {
    "all at once": trace_maker(24, None, Lengths(16, 512), Lengths(8, 96)),
    "half loaded": trace_maker(24, 2.0, Lengths(16, 512), Lengths(8, 96)),
    "nearly full": trace_maker(32, 3.5, Lengths(16, 1024, 80, 0.8), Lengths(4, 128, 40, 0.6)),
    "shared prefixes": trace_maker(24, 2.5, Lengths(16, 128), Lengths(8, 96), num_prefixes=3, prefix_tokens=256),
    "long prompts": trace_maker(8, 0.7, Lengths(512, 1500), Lengths(16, 64)),
}


def jobs_of(trace: list[TraceRequest], engine: Engine, rng: random.Random) -> list[Job]:
    """Return the trace as requests with random prompts."""
    vocab = range(100, min(1000, engine.vocab_size))
    prefixes = {request.prefix: rng.choices(vocab, k=request.prefix_tokens) for request in trace}
    jobs = []
    for request in trace:
        shared = prefixes[request.prefix][: request.prefix_tokens]
        prompt = shared + rng.choices(vocab, k=request.prompt_tokens - len(shared))
        params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        jobs.append(Job(prompt, params, request.arrival_s))
    return jobs


def figures_of(run: Replay) -> dict[str, float]:
    """Return the compared figures of a run of the engine."""
    several = [timeline for timeline in run.timelines if len(timeline.token_ids) > 1]
    return {
        "tokens/s": run.tokens_per_s,
        "TPOT mean": statistics.mean(t.decode_s / (len(t.token_ids) - 1) for t in several),
        "TTFT p50": percentile(run.first_token_s, 50),
    }


def simulated_figures(trace: list[TraceRequest], costs: CostFile) -> dict[str, float]:
    """Return the figures of a simulated trace."""
    simulation = simulate(trace, costs, RoundRobin(1))
    summary = Summary.of(simulation)
    assert summary.tpot_s.mean is not None
    assert summary.ttft_s.p50 is not None
    return {
        "tokens/s": summary.tokens_per_s,
        "TPOT mean": summary.tpot_s.mean,
        "TTFT p50": summary.ttft_s.p50,
        "hit tokens": simulation.replicas[0].block_manager.num_hit_tokens,
    }


def rows(measured: list[dict[str, float]], simulated: list[dict[str, float]]) -> list[list[str]]:
    """Return a table of a trace's figures: medians over the repeats, and the errors of the single ones."""
    table = [["figure", "engine", "simulated", "error", "from", "to", "wanted"]]
    for name in simulated[0]:
        pairs = [(run[name], other[name]) for run, other in zip(measured, simulated, strict=True)]
        errors = [value / run - 1 if run else 0.0 for run, value in pairs]
        medians = [f"{statistics.median(values):.4g}" for values in zip(*pairs, strict=True)]
        shown = [f"{error:+.1%}" for error in (statistics.median(errors), min(errors), max(errors))]
        table.append([name, *medians, *shown, f"{FIGURES[name]:.0%}" if name in FIGURES else "0%"])
    return table


if __name__ == "__main__":
    sys.exit(main())
