"""Decoding with a draft head against decoding without drafts: speed of greedy answers, one sequence at a time.

The prompts are those that `fastinfer train-head` held out of the same file. Without drafts and with 1, 2 and 3 at most,
the same answers take turns; their tokens must be equal. The clock is that of the process's CPU time by default.

    python bench/bench_draft_head.py --head HEAD --data PROMPTS --out bench/results
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from fastinfer import LLM, SamplingParams, hub
from fastinfer.benchmarks.report import median_ratio, write_json
from fastinfer.train_head.prompts import read_prompts
from fastinfer.utils.table import format_table

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
DRAFTS = (1, 2, 3)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 1, "enable_prefix_caching": False}
    engines = {0: LLM(args.model, **options)}
    for count in DRAFTS:
        engines[count] = LLM(args.model, draft_model=str(args.head), num_speculative_tokens=count, **options)
    held_out = read_prompts(str(args.data), engines[0].engine, lambda: False).held_out
    prompts: Any = [{"prompt_token_ids": ids} for ids in held_out[: args.prompts]]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    clock, seconds = CLOCKS[args.clock], {count: list[float]() for count in engines}
    for llm in engines.values():
        llm.generate(prompts[0], params)  # records graphs
    for prompt in prompts:
        texts = []
        for count, llm in engines.items():
            start = clock()
            texts.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
            seconds[count].append(clock() - start)
        if any(text != texts[0] for text in texts):
            raise SystemExit(f"expected the same tokens with and without drafts, got others: {prompt}")
    results = []
    for count, llm in engines.items():
        stats = llm.engine.stats()
        results.append(
            {
                "drafts": count,
                "seconds": seconds[count],
                "speedup": sum(seconds[0]) / sum(seconds[count]),
                "median_ratio": median_ratio(seconds[0], seconds[count]),
                "accepted": stats.num_accepted_tokens / max(stats.num_drafted_tokens, 1),
            }
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL)
    parser.add_argument("--head", type=Path, required=True, help="folder that fastinfer train-head has written")
    parser.add_argument("--data", type=Path, required=True, help="its file of prompts")
    parser.add_argument("--prompts", type=int, default=24, help="number of held-out prompts; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer; default: %(default)s")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--out", type=Path, help="folder for draft_head.json")
    args = parser.parse_args()
    results = measure(args)
    rows = [["drafts", "speed, times no drafts", "median of the answers", "drafts accepted"]]
    for case in results:
        rows.append(
            [str(case["drafts"]), f"{case['speedup']:.2f}", f"{case['median_ratio']:.2f}", f"{case['accepted']:.0%}"]
        )
    print(format_table(rows))
    if args.out is not None:
        training = json.loads((args.head / "training_report.json").read_text())
        measured = {"model": args.model, "clock": args.clock, "training": training, "results": results}
        print(write_json(args.out / "draft_head.json", measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
