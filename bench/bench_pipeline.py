"""Speed of pipeline parallelism on a CPU: one process, stages with one step in flight, and stages that all have one.

Each process has one thread. The three take turns: a prompt of several chunks, then sequences that decode together.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastinfer import LLM, SamplingParams, hub
from fastinfer._C import set_num_threads
from fastinfer.benchmarks.report import median_ratio, write_json
from fastinfer.engine.rank_worker import RankWorker

CASES = ("one process", "one in flight", "all stages")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", help="of each stage; default: by the number of weights")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each sequence generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the seconds of all rounds")
    args = parser.parse_args(argv)
    set_num_threads(args.stages)  # which the ranks share
    limits: dict[str, Any] = {
        "device": "cpu",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": args.chunk_tokens,
        "max_model_len": args.chunks * args.chunk_tokens + args.tokens + 16,
        "max_num_seqs": args.sequences,
    }
    divided = LLM(args.model, pipeline_parallel_size=args.stages, pipeline_parallel_layers=args.layers, **limits)
    whole = LLM(args.model, **limits)  # with one thread, as this process has had since
    works: dict[str, Callable[[LLM], float]] = {
        f"prompt of {args.chunks} chunks": lambda llm: seconds(llm, 1, args.chunks * args.chunk_tokens, 1),
        f"{args.sequences} sequences": lambda llm: seconds(llm, args.sequences, 4, args.tokens),
    }
    samples: dict[str, dict[str, list[float]]] = {work: {case: [] for case in CASES} for work in works}
    for number in range(args.rounds + 1):
        for work, run in works.items():
            for case in CASES:
                set_in_flight(divided, 1 if case == "one in flight" else args.stages)
                taken = run(whole if case == "one process" else divided)
                if number:  # the first round records graphs
                    samples[work][case].append(taken)
    report(samples)
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        print(write_json(args.json, {"options": options, "seconds": samples}))


def seconds(llm: LLM, num_prompts: int, prompt_tokens: int, max_tokens: int) -> float:
    """Return the time for random prompts of this length, which generate this many tokens each."""
    size = llm.engine.vocab_size
    prompts: Any = [
        {"prompt_token_ids": [random.randrange(size) for _ in range(prompt_tokens)]} for _ in range(num_prompts)
    ]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    return time.perf_counter() - start


def set_in_flight(llm: LLM, count: int) -> None:
    """Limit the steps in flight; none may be in flight now."""
    worker = llm.engine.worker
    assert isinstance(worker, RankWorker)
    worker.num_slots, worker._next_slot = count, 0


def report(samples: dict[str, dict[str, list[float]]]) -> None:
    """Print the medians, and the median of each round's ratio to the other cases."""
    for work, cases in samples.items():
        print(work)
        for case, taken in cases.items():
            ratios = [f"{median_ratio(cases[other], taken):.2f} x {other}" for other in CASES if other != case]
            print(f"  {case:14} {1e3 * statistics.median(taken):8.1f} ms   {', '.join(ratios)}")


if __name__ == "__main__":
    main()
