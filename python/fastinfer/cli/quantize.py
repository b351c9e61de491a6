"""``fastinfer quantize``: write a quantised copy of a model."""

import argparse
import json
from pathlib import Path

from tqdm import tqdm

from fastinfer import hub
from fastinfer.cli.checks import quantization_method
from fastinfer.cli.late_bar import late_bar
from fastinfer.evaluation.perplexity import perplexity
from fastinfer.evaluation.text_file import Sections, read_sections
from fastinfer.models import load_model, open_checkpoint, read_tokenizer
from fastinfer.quantize.checkpoint import quantize_checkpoint


def run(args: argparse.Namespace) -> int:
    """Quantise the model, and print and write the report."""
    method = quantization_method(args)
    source = hub.resolve(args.model)
    calibration = evaluation = None
    if args.calibration is not None or args.evaluation is not None:
        checkpoint = open_checkpoint(source)
        checkpoint.config.check_length(args.context)
        tokenizer = read_tokenizer(checkpoint)
        calibration, evaluation = (
            None if path is None else read_sections(path, tokenizer, args.context, args.tokens)
            for path in (args.calibration, args.evaluation)
        )
        del checkpoint
    num_tokens = 0 if calibration is None else calibration.num_tokens
    with late_bar(desc=f"{method.name}, {num_tokens} tokens", unit="layer") as bar:

        def progress(done: int, total: int) -> None:
            bar().total = total
            bar().update(done - bar().n)

        out = Path(args.out)
        texts = [] if calibration is None else calibration.ids
        report = quantize_checkpoint(source, out, method, texts, progress)
    if evaluation is not None:
        report.perplexity_before, report.perplexity_after = (_perplexity(path, evaluation) for path in (source, out))
    (out / "quantization_report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
    print(report)
    print(out)
    return 0


def _perplexity(path: Path, sections: Sections) -> float:
    model, _ = load_model(path, "float32", max_model_len=len(sections.ids[0]))
    with tqdm(total=len(sections.ids), desc=f"perplexity of {path.name}", unit="text") as bar:
        return perplexity(model, sections, progress=bar.update)
