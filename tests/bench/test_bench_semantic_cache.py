"""Counting of the benchmark of the semantic cache, on vectors made by hand."""

import json

import numpy as np
from bench_semantic_cache import PAIRS, SAME, cache_hits, row, similarities

VECTORS = {
    name: np.array([np.cos(angle), np.sin(angle)], dtype=np.float32)
    for name, angle in {"a": 0.0, "a2": 0.1, "b": 1.5, "b2": 2.3, "c": 3.0, "not c": 3.05}.items()
}
SMALL = {SAME: [["a", "a2"], ["b", "b2"]], "negation": [["c", "not c"]]}


def test_precision_and_recall() -> None:
    scores = similarities(SMALL, VECTORS)
    assert row(scores, 0.9) == [0.9, 1 / 2, 1 / 2, 1.0]
    assert row(scores, 0.9999) == [0.9999, None, 0.0, 0.0]


def test_a_hit_on_another_question_is_wrong() -> None:
    assert cache_hits(SMALL, VECTORS, 0.9) == (1, 1)
    # b2 is nearer to c than to b.
    assert cache_hits(SMALL, VECTORS, 0.6) == (1, 2)


def test_the_pairs() -> None:
    pairs = json.loads(PAIRS.read_text())
    assert sum(map(len, pairs.values())) >= 60
    texts = [text for kind in pairs.values() for pair in kind for text in pair]
    assert len(texts) == len(set(texts)) == 2 * sum(map(len, pairs.values()))
