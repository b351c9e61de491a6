"""``fastinfer eval``: perplexity of a model on a text, or comparison of several models."""

import argparse
import json
from pathlib import Path
from typing import Any

from fastinfer import hub
from fastinfer.benchmarks.progress import show_progress
from fastinfer.benchmarks.report import print_plot, write_json
from fastinfer.cli.arguments import SECTION_TOKENS
from fastinfer.evaluation import comparison
from fastinfer.evaluation.perplexity import perplexity
from fastinfer.evaluation.text_file import read_sections
from fastinfer.llm import kv_cache_dtype_of
from fastinfer.models import load_model, open_checkpoint
from fastinfer.models.config import Precision
from fastinfer.utils.device import resolve_device
from fastinfer.utils.finite_json import finite_json

DEFAULTS: dict[str, Any] = {
    "dtype": "auto",
    "device": "auto",
    "kv_cache_dtype": "auto",
    "max_model_len": SECTION_TOKENS,
    "max_num_seqs": 1,
}


def run(args: argparse.Namespace) -> int:
    """Run the chosen evaluation and print its result."""
    options = DEFAULTS | args.engine_options
    return _compare(args, options) if args.what == "compare" else _perplexity(args, options)


def _perplexity(args: argparse.Namespace, options: dict[str, Any]) -> int:
    dtype, device, length = options["dtype"], resolve_device(options["device"]), options["max_model_len"]
    cache_dtype = kv_cache_dtype_of(options["kv_cache_dtype"], dtype, device)
    with show_progress(args.models[0]) as progress:
        progress("loading")
        checkpoint = open_checkpoint(hub.resolve(args.models[0]), Precision.of(dtype, device).exact)
        checkpoint.config.check_length(length)
        model, tokenizer = load_model(checkpoint, dtype, device, length)
        sections = read_sections(args.text, tokenizer, length, args.tokens)
        progress(f"{sections.num_tokens} tokens")
        found = perplexity(model, sections, cache_dtype, device=device, batch_size=options["max_num_seqs"])
    values = {"perplexity": found, "tokens": sections.num_tokens}
    print(json.dumps(finite_json(values)) if args.json else f"{found:.4f}")
    return 0


def _compare(args: argparse.Namespace, options: dict[str, Any]) -> int:
    length = options.pop("max_model_len")
    with show_progress("compare") as progress:
        results = comparison.compare(
            args.models, args.text, length, args.tokens, speed=args.speed, progress=progress, **options
        )
    print(comparison.report(results))
    if args.out is not None:
        path = Path(args.out) / "compare.json"
        settings = {name: value for name, value in vars(args).items() if name not in ("command", "out")}
        write_json(path, {"settings": settings, "results": comparison.as_json(results)})
        print_plot(lambda: comparison.plot(results, path.with_suffix(".png")))
    return 0
