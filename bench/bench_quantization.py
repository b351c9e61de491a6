"""Comparison of all quantisation methods on the default model: the table and the plot of docs/formats.md.

``python bench/bench_quantization.py --out DIR`` dequantises the model to bf16 with transformers, quantises it by every
method with the docstrings of Python's standard library as the calibration text, and evaluates all results on Python's
language reference. Both texts come with Python.
"""

import argparse
import ast
import contextlib
import pydoc_data.topics
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastinfer import hub
from fastinfer.cli.main import main as fastinfer

METHODS = ("rtn", "gptq", "awq", "nf4", "int8", "w8a8")


def calibration_text() -> str:
    """Return the longer docstrings of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.append(ast.get_docstring(node) or "")
    return "\n\n".join(text for text in found if len(text) > 200)


def evaluation_text() -> str:
    return "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def dequantize(source: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder of bf16 weights."""
    stored = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = {key: value for key, value in stored.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(stored.config).from_dict(config), dtype=torch.bfloat16)
    model.load_state_dict(stored.state_dict())  # a model read from GGUF refuses to be saved
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def run(*arguments: object) -> None:
    if fastinfer([str(argument) for argument in arguments]):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL, help="a GGUF file; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of each text; default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="folder of compare.json and compare.png")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="NAME,NAME", help="default: %(default)s")
    parser.add_argument("--keep", type=Path, help="folder for the checkpoints; existing ones are reused")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"calibration": calibration_text(), "evaluation": evaluation_text()}
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text)
        if not (folder / "bf16").exists():
            dequantize(hub.resolve(args.model), folder / "bf16")
        methods = args.methods.split(",")
        for method in methods:
            if (folder / method).exists():
                continue
            start = time.perf_counter()
            calibration = folder / "calibration.txt"
            options = "--method", method, "--calibration", calibration, "--tokens", args.tokens
            run("quantize", folder / "bf16", *options, "--out", folder / method)
            print(f"{method}: {time.perf_counter() - start:.0f} s")
        models = [folder / name for name in ("bf16", *methods)]
        text = "--text", folder / "evaluation.txt", "--tokens", args.tokens
        run("eval", "compare", *models, *text, "--dtype", "float32", "--out", args.out)


if __name__ == "__main__":
    main()
