"""Kinds of layers beside transformers and llama.cpp: a random model of each, in bf16 in all engines.

    python bench/bench_families.py --peer /path/to/venv/bin/python
    python bench/bench_families.py --peer /path/to/venv/bin/python --weights q4_k_m

With ``--weights`` of another type, llama.cpp quantises the model, and fastinfer and llama.cpp read the same file.
Models are those of families.py, written once into the folder of ``--models``. Engines take turns as in bench_peers.py;
the table shows medians of the ratios of each round, and in brackets their quartiles.
"""

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_peers import ROOT, Comparison, Samples, Workload, commit, measure, quantize
from families import KINDS, MAX_TOKENS, VOCAB_SIZE, gguf_path, write_model
from peers.process import Peer, PeerError

from fastinfer.benchmarks.report import percentile, write_json
from fastinfer.utils.table import format_table

ENGINES = {"fastinfer": "fastinfer_bf16", "transformers_bf16": "transformers_bf16", "llama_cpp": "llama_cpp"}
WEIGHTS = ("bf16", "q8_0", "q4_k_m", "q4_0", "mxfp4_moe")
WORKLOADS = {"decode": Workload(1, 32, 17, "decode"), "prefill": Workload(1, 512, 1, "prefill")}


def prepare(folder: Path, kind: str, args: argparse.Namespace) -> None:
    """Write the model's files that do not exist yet."""
    if not (folder / "tokenizer.json").exists():
        write_model(folder, kind)
    target = gguf_path(folder, args.weights)
    if gguf_path(folder).exists() and not target.exists():
        quantize(gguf_path(folder), target, args.weights, args.peer)


def start(folder: Path, args: argparse.Namespace) -> Comparison:
    """Start all engines on a model."""
    comparison = Comparison({}, {})
    settings = {"threads": args.threads, "max_tokens": MAX_TOKENS, "max_requests": 1}
    for name, engine in ENGINES.items():
        if name not in args.engines:
            continue
        python = args.peer if name == "llama_cpp" else sys.executable
        reads_file = name == "llama_cpp" or args.weights != "bf16"
        model = gguf_path(folder, args.weights) if reads_file else folder
        if not model.exists():
            comparison.skip(name, "GGUF does not have this kind of model")
            continue
        try:
            comparison.peers[name] = Peer(engine, python, settings | {"model": str(model)}, args.turn_limit_s)
        except PeerError as error:
            comparison.skip(name, str(error))
    return comparison


def summary(samples: Samples) -> dict[str, Any]:
    """Return each engine's median of tokens/s, and quartiles of the ratios of fastinfer's speed to it."""
    results: dict[str, Any] = {}
    for name, answers in samples.items():
        rates = {key: [WORKLOADS[key].tokens_per_s(a) for a in answers[key]] for key in WORKLOADS}
        results[name] = {"tokens_per_s": {key: statistics.median(values) for key, values in rates.items()}}
        results[name]["all_tokens_per_s"] = rates
    ours = results.get("fastinfer", {}).get("all_tokens_per_s")
    for name, engine in results.items():
        if ours is None or name == "fastinfer":
            continue
        engine["fastinfer_is_times"] = {}
        for key, rates in engine["all_tokens_per_s"].items():
            ratios = [a / b for a, b in zip(ours[key], rates, strict=True)]
            quartiles = [percentile(ratios, 25), statistics.median(ratios), percentile(ratios, 75)]
            engine["fastinfer_is_times"][key] = quartiles
    return results


def report(kinds: dict[str, Any]) -> str:
    """Return a table with a row for each kind and peer."""
    rows = [["kind", "beside", "decode", "prefill", "tokens/s, both", "ours"]]
    for kind, engines in kinds.items():
        ours = engines.get("fastinfer")
        for name, engine in engines.items():
            if "fastinfer_is_times" not in engine:
                continue
            ratios = [f"{m:.2f} ({low:.2f} to {high:.2f})" for low, m, high in engine["fastinfer_is_times"].values()]
            speeds = [" ".join(f"{v:.1f}" for v in e["tokens_per_s"].values()) for e in (engine, ours)]
            rows.append([kind, name, *ratios, *speeds])
    return format_table(rows)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "build/families", help="default: %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="default: %(default)s")
    parser.add_argument("--peer", default=sys.executable, help="interpreter that has llama-cpp-python installed")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine; default: %(default)s")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--limit-s", type=float, default=240, help="of a kind; default: %(default)s")
    parser.add_argument("--turn-limit-s", type=float, default=120, help="skip an engine that takes longer")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/families.json", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.weights != "bf16":  # transformers would unpack the file
        args.engines = [name for name in args.engines if name != "transformers_bf16"]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ["BENCH_CLOCK"] = args.clock
    rng = random.Random(0)
    text = [rng.randrange(3, VOCAB_SIZE) for _ in range(1 << 16)]
    results: dict[str, Any] = {}
    for kind in args.kinds:
        folder = args.models / kind
        print(kind, flush=True)
        prepare(folder, kind, args)
        comparison = start(folder, args)
        try:
            samples = measure(comparison, text, WORKLOADS, args.rounds, time.perf_counter() + args.limit_s)
        finally:
            for peer in comparison.peers.values():
                peer.close()
        results[kind] = summary(samples)
        print(report({kind: results[kind]}), flush=True)
    settings = {"threads": args.threads, "clock": args.clock, "rounds": args.rounds, "weights": args.weights}
    settings["workloads"] = {key: asdict(workload) for key, workload in WORKLOADS.items()}
    print(write_json(args.out, {"commit": commit(), "settings": settings, "kinds": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
