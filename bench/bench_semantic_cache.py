"""Precision of the semantic response cache: how many of its hits are answers to the same question.

``semantic_pairs.json`` has pairs of questions. Paraphrases want the same answer; pairs that differ by a negation, a
number or a name want different ones. A pair is a hit at a threshold if the cosine of its embeddings, those that the
server computes (the mean of the last hidden states), reaches it. Each question also counts against all questions of the
other pairs, as in a cache that holds all of them: there the most similar one decides.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastinfer.benchmarks.report import write_json
from fastinfer.utils.table import format_table

PAIRS = Path(__file__).with_name("semantic_pairs.json")
SAME = "paraphrase"
THRESHOLDS = (0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)

Pairs = dict[str, list[list[str]]]
Scores = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, help="folder for semantic_cache.json")
    args = parser.parse_args()
    pairs = json.loads(PAIRS.read_text())
    texts = list(dict.fromkeys(itertools.chain(*itertools.chain(*pairs.values()))))
    vectors = dict(zip(texts, embeddings(args.model, texts), strict=True))
    scores = similarities(pairs, vectors)
    rows = [row(scores, threshold) for threshold in THRESHOLDS]
    print(report(scores, rows))
    print(report_cache([(threshold, *cache_hits(pairs, vectors, threshold)) for threshold in THRESHOLDS]))
    if args.out is not None:
        print(write_json(args.out / "semantic_cache.json", vars(args) | {"out": str(args.out), "similarities": scores}))
    return 0


def embeddings(model: str, texts: list[str]) -> NDArray[np.float32]:
    """Return the unit vectors of texts, [texts, dim]."""
    from fastinfer import LLM

    outputs = LLM(model).embed(texts)
    return np.asarray([output.embedding for output in outputs], dtype=np.float32)


def similarities(pairs: Pairs, vectors: dict[str, NDArray[np.float32]]) -> Scores:
    """Return the cosine of each pair, by kind."""
    return {kind: [float(vectors[one] @ vectors[other]) for one, other in pairs[kind]] for kind in pairs}


def row(scores: Scores, threshold: float) -> list[float | None]:
    """Return the threshold, precision, recall, and the share of hits of each kind."""
    hits = {kind: sum(score >= threshold for score in values) for kind, values in scores.items()}
    total = sum(hits.values())
    precision = hits[SAME] / total if total else None
    shares = [hits[kind] / len(scores[kind]) for kind in scores if kind != SAME]
    return [threshold, precision, hits[SAME] / len(scores[SAME]), *shares]


def cache_hits(pairs: Pairs, vectors: dict[str, NDArray[np.float32]], threshold: float) -> tuple[int, int]:
    """Return the right and the wrong hits of a cache with the first question of each pair that is asked the second.

    A hit is right if the pair is a paraphrase and its own first question is the most similar one.
    """
    stored = [one for kind in pairs for one, _ in pairs[kind]]
    matrix = np.stack([vectors[one] for one in stored])
    right = wrong = 0
    for kind in pairs:
        for one, other in pairs[kind]:
            cosines = matrix @ vectors[other]
            best = int(cosines.argmax())
            if cosines[best] >= threshold:
                is_right = kind == SAME and stored[best] == one
                right, wrong = right + is_right, wrong + (not is_right)
    return right, wrong


def report(scores: Scores, rows: list[list[float | None]]) -> str:
    head = ["threshold", "precision", "recall", *(f"hits: {kind}" for kind in scores if kind != SAME)]
    cells = [[f"{first:g}", *("-" if cell is None else f"{cell:.2f}" for cell in rest)] for first, *rest in rows]
    ranges = [
        f"{kind}: {len(values)} pairs, cosines {min(values):.3f} to {max(values):.3f}, median {np.median(values):.3f}"
        for kind, values in scores.items()
    ]
    return "\n".join([*ranges, "", format_table([head, *cells])])


def report_cache(rows: list[tuple[float, int, int]]) -> str:
    cells = [[f"{threshold:g}", str(right), str(wrong)] for threshold, right, wrong in rows]
    table = format_table([["threshold", "right hits", "wrong hits"], *cells])
    return f"\nA cache with the first question of each pair, asked the second:\n{table}"


if __name__ == "__main__":
    raise SystemExit(main())
