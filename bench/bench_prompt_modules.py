"""Prompts of modules against whole prompts: how far the next token moves, and the time to the first one.

Quality: three modules are consecutive stretches of one text, and the free text goes on where they end. After each of
its tokens the distribution of the next one is compared with that of the whole prompt, for several numbers of recomputed
blocks. Without any module, the free text at the same positions, it shows how much the modules matter at all.

Time: prompts of a parameter, three modules of random tokens and a free text, with an empty cache and after another
prompt with the same modules, in turns. The other prompt has another free text, or also another value of the parameter;
then everything that is recomputed follows something new. The clock is that of the process's CPU time by default.

    python bench/bench_prompt_modules.py --out bench/results
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer import SamplingParams
from fastinfer.benchmarks.report import median_ratio, write_json
from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.engine import Engine
from fastinfer.engine.prompt_layout import Piece, PromptLayout
from fastinfer.utils.table import format_table
from fastinfer.utils.torch_threads import set_num_threads

DATA = Path(__file__).parents[1] / "tests/data"
TEXTS = [DATA / f"{name}.txt" for name in ("project_documents", "python_execution_model", "python_import_system")]
NUM_MODULES = 3
WHOLE = 10**6  # recomputed blocks: all, so that nothing is reused
CASES = {"cold": "all", "text": "the text", "parameter": "the parameter and the text"}
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def lay_out(modules: list[list[int]], text: list[int], value: list[int] | None = None) -> list[Piece]:
    """The value of a parameter, if there is one, the modules one after the other, and the text at their end."""
    pieces = [] if value is None else [Piece(value, 0)]
    position = len(value or [])
    for module in modules:
        pieces.append(Piece(module, position, is_module=True))
        position += len(module)
    return [*pieces, Piece(text, position)]


def first_token(engine: Engine, pieces: list[Piece], recomputed: int, params: SamplingParams) -> int:
    """Compute a prompt and draw one token; return the number of tokens that were in the cache."""
    layout = PromptLayout(pieces, engine.config.block_size, recomputed)
    engine.add_request(engine.validate(layout.token_ids, params, layout=layout), params)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs[-1].num_cached_tokens


def log_probabilities(engine: Engine, pieces: list[Piece], count: int, recomputed: int) -> Tensor:
    """The distributions after each of the last tokens, [count, vocab]."""
    rows: list[Tensor] = []

    def keep(tokens: Any, logits: Tensor) -> None:
        rows.append(logits.log_softmax(-1).clone())

    params = SamplingParams(temperature=0.0, max_tokens=1, logits_processors=[keep])
    *modules, text = pieces
    for end in range(len(text.token_ids) - count + 1, len(text.token_ids) + 1):
        first_token(engine, [*modules, Piece(text.token_ids[:end], text.position)], recomputed, params)
    return torch.stack(rows)


def measure_quality(args: argparse.Namespace, subject: Subject) -> list[dict[str, Any]]:
    """KL from the whole prompt in nats, and the share of tokens whose likeliest next token is the same."""
    return [case for block_size in args.block_size for case in quality_of(args, subject, block_size)]


def quality_of(args: argparse.Namespace, subject: Subject, block_size: int) -> list[dict[str, Any]]:
    size = NUM_MODULES * args.module
    engine = subject.make_engine(max_num_seqs=4, max_model_len=2 * size, block_size=block_size)
    results: dict[str, list[Tensor]] = {}
    for path in args.text:
        tokens = subject.tokenizer.encode(path.read_text())
        for start in range(0, len(tokens) - size - args.tokens, size // 2):
            part = tokens[start : start + size + args.tokens]
            modules = [part[first : first + args.module] for first in range(0, size, args.module)]
            pieces = lay_out(modules, part[size:])
            whole = log_probabilities(engine, pieces, args.tokens, WHOLE)
            cases = [(f"{blocks}", pieces, blocks) for blocks in args.recomputed]
            for name, own, blocks in [*cases, ("no modules", pieces[-1:], 0)]:
                found = log_probabilities(engine, own, args.tokens, blocks)
                kl = (whole.exp() * (whole - found)).sum(-1, dtype=torch.float64)
                same = whole.argmax(-1) == found.argmax(-1)
                results.setdefault(name, []).append(torch.stack([kl, same.double()]))
            engine.block_manager.reset_prefix_cache()
    quality = []
    for name, parts in results.items():
        kl, same = torch.cat(parts, dim=1)
        case = {"block_size": block_size, "recomputed": name, "kl": float(kl.mean()), "agreement": float(same.mean())}
        quality.append(case | {"num_tokens": len(kl)})
    return quality


def measure_time(args: argparse.Namespace, subject: Subject) -> list[dict[str, Any]]:
    """Seconds to the first token with an empty cache and with the modules in it."""
    now, rng, results = CLOCKS[args.clock], random.Random(0), []
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for length, block_size in itertools.product(args.lengths, args.block_size):
        limits = {"max_num_seqs": 4, "max_model_len": 2 * NUM_MODULES * length + 64, "block_size": block_size}
        engine = subject.make_engine(**limits)
        modules = [subject.random_prompt(rng, length) for _ in range(NUM_MODULES)]
        samples: dict[str, list[float]] = {name: [] for name in CASES}
        for _ in range(1 + args.rounds):
            for name, own in samples.items():
                value = subject.random_prompt(rng, args.value)
                before = subject.random_prompt(rng, args.value) if name == "parameter" else value
                engine.block_manager.reset_prefix_cache()
                recomputed = WHOLE  # the prompt as it is without modules
                if name != "cold":
                    recomputed = 1
                    first_token(engine, lay_out(modules, subject.random_prompt(rng, args.tail), before), 1, params)
                pieces = lay_out(modules, subject.random_prompt(rng, args.tail), value)
                start = now()
                cached = first_token(engine, pieces, recomputed, params)
                own.append(now() - start)
                assert (cached > 0) is (name != "cold")
        for name, own in samples.items():
            ratio = median_ratio(own[1:], samples["cold"][1:])
            case = {"module": length, "block_size": block_size, "new": name, "samples_s": own[1:], "ratio": ratio}
            results.append(case)
    return results


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    if quality := results.get("quality"):
        rows = [["block size", "recomputed blocks", "KL, nats", "same token", "tokens"]]
        for case in quality:
            agreement = f"{case['agreement']:.1%}"
            rows.append(
                [str(case["block_size"]), case["recomputed"], f"{case['kl']:.4f}", agreement, str(case["num_tokens"])]
            )
        parts.append(format_table(rows))
    if times := results.get("time"):
        rows = [["tokens of a module", "block size", "what is new", "first token ms", "of the whole prompt"]]
        for case in times:
            milliseconds = 1e3 * statistics.median(case["samples_s"])
            names = [str(case["module"]), str(case["block_size"]), CASES[case["new"]]]
            rows.append([*names, f"{milliseconds:.1f}", f"{case['ratio']:.3f}"])
        parts.append(format_table(rows))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32], help="tokens of a block of the cache")
    parser.add_argument("--module", type=int, default=600, help="tokens of a module whose quality is measured")
    parser.add_argument("--tokens", type=int, default=32, help="tokens after the modules that are compared")
    parser.add_argument("--recomputed", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="blocks")
    parser.add_argument("--lengths", type=int, nargs="+", default=[150, 300, 600, 900], help="tokens of a timed module")
    parser.add_argument("--value", type=int, default=8, help="tokens of the parameter")
    parser.add_argument("--tail", type=int, default=16, help="tokens of the free text of the times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--only", choices=["quality", "time"])
    parser.add_argument("--out", type=Path, help="folder for prompt_modules.json")
    args = parser.parse_args()
    set_num_threads(args.threads)
    subject = Subject.load(args.model, device="cpu")
    measures = {"time": measure_time, "quality": measure_quality}
    results = {name: measure(args, subject) for name, measure in measures.items() if args.only in (None, name)}
    print(report(results))
    if args.out is not None:
        settings = {name: getattr(args, name) for name in ("model", "module", "tokens", "tail", "threads", "clock")}
        print(write_json(args.out / "prompt_modules.json", {**settings, **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
