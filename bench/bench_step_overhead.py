"""Time of a decode step on the CPU outside its recorded graphs: Python's share of the step.

The graphs compute the model and draw the tokens; the rest schedules, writes the inputs, and updates the requests and
their texts. It is measured beside the real model, whose weights push Python's data out of the caches. With
``--checkout`` other versions of fastinfer, built in place, run the same steps in processes of their own, in turns.

    python bench/bench_step_overhead.py --checkout ../earlier --out bench/results
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = list(range(1000, 1016))
WARM_UP = 8  # steps, in which the graphs of all sizes are recorded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=40, help="steps per batch and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkout", type=Path, action="append", default=[], help="folder of another version")
    parser.add_argument("--out", type=Path, help="folder for step_overhead.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        answer_turns(args.model, args.threads, max(args.batch))
        return 0
    from fastinfer.benchmarks.report import write_json

    samples = measure(args)
    print(report(samples))
    if args.out is not None:
        print(write_json(args.out / "step_overhead.json", {"steps": args.steps, "samples": samples}))
    return 0


def answer_turns(model: str, threads: int, max_batch: int) -> None:
    """Read lines of a batch size and a number of steps, and print each step's seconds outside the graphs and within."""
    import torch

    from fastinfer import _C, LLM, SamplingParams, ops

    torch.set_num_threads(threads)
    _C.set_num_threads(threads)
    llm = LLM(model, max_num_seqs=max_batch, max_model_len=512)
    replay, in_graphs = ops.CPUGraph.replay, [0.0]

    def timed_replay(graph: ops.CPUGraph) -> None:
        start = time.perf_counter()
        replay(graph)
        in_graphs[0] += time.perf_counter() - start

    ops.CPUGraph.replay = timed_replay  # type: ignore[method-assign]
    for line in sys.stdin:
        batch, steps = map(int, line.split())
        params = SamplingParams(temperature=0, max_tokens=WARM_UP + steps + 2, ignore_eos=True)
        for _ in range(batch):
            llm.engine.add_request(PROMPT, params)
        outside, graphs = [], []
        while llm.engine.has_unfinished:
            in_graphs[0], start = 0.0, time.perf_counter()
            llm.engine.step()
            outside.append(time.perf_counter() - start - in_graphs[0])
            graphs.append(in_graphs[0])
        print(json.dumps([outside[-steps - 1 : -1], graphs[-steps - 1 : -1]]), flush=True)


def measure(args: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Return for each version and batch size the median of each round, in seconds."""
    versions: dict[str, Path | None] = {"this version": None} | {str(path): path for path in args.checkout}
    options = ["--child", "--model", args.model, "--threads", str(args.threads), "--batch", *map(str, args.batch)]
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, *options],
            env=os.environ if path is None else os.environ | {"PYTHONPATH": str(path.resolve() / "python")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, path in versions.items()
    }
    samples: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in args.batch} for name in versions}
    for number in range(args.rounds + 1):  # the first one warms up
        for batch in args.batch:
            for name, child in children.items():
                assert child.stdin is not None
                assert child.stdout is not None
                print(batch, args.steps, file=child.stdin, flush=True)
                answer = child.stdout.readline()
                if not answer:
                    raise RuntimeError(f"the process of {name} ended with {child.wait()}")
                outside, _ = json.loads(answer)
                if number > 0:
                    samples[name][batch].append(statistics.median(outside))
    for child in children.values():
        child.communicate()
    return samples


def report(samples: dict[str, dict[int, list[float]]]) -> str:
    """Return the medians of all rounds, and the ratios to this version's."""
    from fastinfer.benchmarks.report import median_ratio
    from fastinfer.utils.table import format_table

    rows = [["version", "batch", "ms outside the graphs", "of this version's"]]
    first = next(iter(samples.values()))
    for name, batches in samples.items():
        for batch, seconds in batches.items():
            ratio = median_ratio(seconds, first[batch])
            rows.append([name, str(batch), f"{statistics.median(seconds) * 1e3:.3f}", f"{ratio:.2f}"])
    return format_table(rows)


if __name__ == "__main__":
    sys.exit(main())
