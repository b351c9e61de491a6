"""``fastinfer eval``: perplexity of a model on a text, or comparison of several models."""

import argparse
import json
from pathlib import Path

from fastinfer import hub
from fastinfer.benchmarks.progress import show_progress
from fastinfer.benchmarks.report import print_plot, write_json
from fastinfer.evaluation import comparison
from fastinfer.evaluation.perplexity import perplexity, split_sections
from fastinfer.evaluation.text_file import read_tokens
from fastinfer.models import load_model
from fastinfer.models.config import Precision


def run(args: argparse.Namespace) -> int:
    """Run the chosen evaluation and print its result."""
    return _compare(args) if args.what == "compare" else _perplexity(args)


def _perplexity(args: argparse.Namespace) -> int:
    with show_progress(args.models[0]) as progress:
        progress("loading")
        model, tokenizer = load_model(hub.resolve(args.models[0]), args.dtype, max_model_len=args.length)
        texts = split_sections(read_tokens(args.text, tokenizer), args.length, args.tokens)
        progress(f"{sum(map(len, texts))} tokens")
        found = perplexity(model, texts, Precision.of(args.dtype).kv_cache_dtype)
    print(json.dumps({"perplexity": found, "tokens": sum(map(len, texts))}) if args.json else f"{found:.4f}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    with show_progress("compare") as progress:
        results = comparison.compare(
            args.models, args.text, args.length, args.tokens, args.dtype, speed=args.speed, progress=progress
        )
    print(comparison.report(results))
    if args.out is not None:
        path = Path(args.out) / "compare.json"
        settings = {name: value for name, value in vars(args).items() if name not in ("command", "out")}
        write_json(path, {"settings": settings, "results": comparison.as_json(results)})
        print_plot(lambda: comparison.plot(results, path.with_suffix(".png")))
    return 0
