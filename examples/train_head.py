"""Trains a draft head for questions about Python's standard library, and answers one of them with and without it.

    python examples/train_head.py head --minutes 6

The model answers questions for the first part of the time, and the head learns from the answers for the rest.
"""

import argparse
import importlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastinfer import LLM, SamplingParams
from fastinfer.cli.main import main as fastinfer
from fastinfer.hub import DEFAULT_MODEL

MODULES = (
    "argparse asyncio base64 bisect calendar codecs collections configparser contextlib copy csv dataclasses "
    "datetime decimal difflib enum fnmatch fractions functools getpass gettext glob gzip hashlib heapq hmac html "
    "inspect itertools json logging lzma math mimetypes operator os pathlib pickle platform pprint queue random "
    "re secrets selectors shelve shutil signal socket sqlite3 statistics string struct subprocess tarfile "
    "tempfile textwrap threading time traceback types typing unittest urllib.parse urllib.request zipfile"
)
QUESTIONS = (
    "What does the Python function {} do?",
    "Explain {} in Python with an example.",
    "How do I use {} in Python?",
    "When should I use {} in Python?",
)
QUESTION = "How do I use shutil.copytree in Python?"


def questions() -> list[str]:
    """One question about each function and class of the modules, in random order."""
    names = sorted(set(_names()))
    random.Random(0).shuffle(names)
    return [QUESTIONS[index % len(QUESTIONS)].format(name) for index, name in enumerate(names)]


def _names() -> Iterator[str]:
    for name in MODULES.split():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [entry for entry in dir(module) if not entry.startswith("_")]
        yield from (f"{name}.{entry}" for entry in public if callable(getattr(module, entry, None)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a draft head, and compare the speed.")
    parser.add_argument("out", type=Path, help="folder of the head, new or empty")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--minutes", default="6", help="time of the training; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="of the answer; default: %(default)s")
    args = parser.parse_args(argv)
    data = args.out.with_suffix(".txt")
    data.write_text("\n".join(questions()) + "\n")
    training = ["--data", str(data), "--minutes", args.minutes, "--out", str(args.out)]
    if code := fastinfer(["train-head", "--model", args.model, *training]):
        return code
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    for name, options in {"without drafts": {}, "with the head": {"draft_model": str(args.out)}}.items():
        llm = LLM(args.model, max_model_len=512, num_speculative_tokens=2 if options else 0, **options)
        output = llm.chat([{"role": "user", "content": QUESTION}], params)
        start = time.perf_counter()
        output = llm.chat([{"role": "user", "content": QUESTION}], params)
        seconds, completion = time.perf_counter() - start, output.outputs[0]
        print(f"[{name}: {len(completion.token_ids) / seconds:.0f} tokens/s]\n{completion.text.strip()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
