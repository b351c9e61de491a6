"""Speed of decoding with tensor parallelism on a CPU: ranks with one thread each, and one process with as many threads.

The two take turns, with one sequence and with several.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from bench_pipeline import seconds

from fastinfer import LLM, hub
from fastinfer._C import set_num_threads
from fastinfer.benchmarks.report import median_ratio, write_json

PROMPT_TOKENS = 4


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", choices=("gather", "reduce"), default="gather")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each sequence generates")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the seconds of all rounds")
    args = parser.parse_args(argv)
    set_num_threads(args.ranks)  # which the ranks share
    limits: dict[str, Any] = {
        "device": "cpu",
        "enable_prefix_caching": False,
        "max_model_len": PROMPT_TOKENS + args.tokens,
        "max_num_seqs": max(args.sequences),
    }
    divided = LLM(args.model, tensor_parallel_size=args.ranks, tensor_parallel_layout=args.layout, **limits)
    whole = LLM(args.model, **limits)
    cases = {"one process": (whole, args.ranks), f"{args.ranks} ranks": (divided, 1)}
    samples: dict[int, dict[str, list[float]]] = {
        sequences: {case: [] for case in cases} for sequences in args.sequences
    }
    for number in range(args.rounds + 1):
        for sequences, taken in samples.items():
            for case, (llm, num_threads) in cases.items():
                set_num_threads(num_threads)
                found = seconds(llm, sequences, PROMPT_TOKENS, args.tokens)
                if number:  # the first round records graphs
                    taken[case].append(found)
    for sequences, taken in samples.items():
        speeds = [f"{case} {sequences * args.tokens / statistics.median(times):.1f}" for case, times in taken.items()]
        ratio = median_ratio(*taken.values())
        print(f"{sequences} sequences, tokens/s: {', '.join(speeds)}; ranks {ratio:.2f} times as fast")
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        print(write_json(args.json, {"options": options, "seconds": samples}))


if __name__ == "__main__":
    main()
