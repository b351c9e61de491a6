"""Distills a model of 30 layers into one of 20, on the documentation that every Python has.

    python examples/distill.py OUT --minutes 10

The texts are the language reference of ``help()`` and the docstrings of the standard library. Some of them are held
out, and the student is judged by those.
"""

import argparse
import ast
import pydoc_data.topics
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastinfer.cli.main import main as fastinfer
from fastinfer.hub import DEFAULT_MODEL

# Layers of SmolLM2 135M without which the text's loss grows least; "--stages 20" finds such layers in a minute.
LAYERS = "layers:0,1,2,3,5,6,7,8,9,10,11,19,20,21,22,23,24,27,28,29"
HELD_OUT = 25_000  # characters
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def documents() -> Iterator[str]:
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)]
        yield "\n\n".join([path.stem, *(text for text in docstrings if text is not None and len(text) > 200)])


def write_texts(folder: Path) -> tuple[Path, Path]:
    """Write the text to learn from, and the one to judge by."""
    texts = list(documents())
    random.Random(0).shuffle(texts)
    held_out: list[str] = []
    for text in texts:
        if len(text) < HELD_OUT // 4 and sum(map(len, held_out)) < HELD_OUT:
            held_out.append(text)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.txt", folder / "unseen.txt"
    unseen = "\n\n".join(held_out)
    # Some topics repeat paragraphs of others.
    paragraphs = (part for text in texts if text not in held_out for part in text.split("\n\n"))
    paths[0].write_text("\n\n".join(part for part in paragraphs if part not in unseen), encoding="utf-8")
    paths[1].write_text(unseen, encoding="utf-8")
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Distill a model on Python's own documentation.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--teacher", default=DEFAULT_MODEL)
    parser.add_argument("--student", default=LAYERS, help="see 'fastinfer distill --help'; default: 20 of 30 layers")
    parser.add_argument("--loss", default="logit", help="default: %(default)s")
    parser.add_argument("--minutes", default="3", help="default: %(default)s")
    args = parser.parse_args(argv)
    train, unseen = write_texts(args.out)
    models = ["--teacher", args.teacher, "--student", args.student]
    texts = ["--data", str(train), "--evaluation", str(unseen)]
    return fastinfer(
        ["distill", *models, *texts, "--loss", args.loss, "--minutes", args.minutes, "--out", str(args.out)]
    )


if __name__ == "__main__":
    raise SystemExit(main())
