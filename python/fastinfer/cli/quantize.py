"""``fastinfer quantize``: write a quantised copy of a model."""

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from fastinfer import hub
from fastinfer.cli.checks import quantization_method
from fastinfer.cli.late_bar import late_bar
from fastinfer.evaluation.perplexity import perplexity, split_sections
from fastinfer.evaluation.text_file import read_tokens
from fastinfer.formats.gguf_shards import open_gguf
from fastinfer.models import load_model
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.tokenizers.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> int:
    """Quantise the model, and print and write the report."""
    method = quantization_method(args)
    source = hub.resolve(args.model)
    tokenizer = Tokenizer.from_folder(source) if source.is_dir() else Tokenizer.from_gguf(open_gguf(source))
    texts, evaluation = (
        [] if path is None else split_sections(read_tokens(path, tokenizer), args.context, args.tokens)
        for path in (args.calibration, args.evaluation)
    )
    with late_bar(desc=f"{method.name}, {sum(map(len, texts))} tokens", unit="layer") as bar:

        def progress(done: int, total: int) -> None:
            bar().total = total
            bar().update(done - bar().n)

        out = Path(args.out)
        report = quantize_checkpoint(source, out, method, texts, progress)
    if evaluation:
        report.perplexity_before, report.perplexity_after = (_perplexity(path, evaluation) for path in (source, out))
    (out / "quantization_report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
    print(report)
    print(out)
    return 0


def _perplexity(path: Path, texts: list[list[int]]) -> float:
    model, _ = load_model(path, "float32", max_model_len=len(texts[0]))
    with tqdm(total=len(texts), desc=f"perplexity of {path.name}", unit="text") as bar:
        return perplexity(model, texts, progress=bar.update)
