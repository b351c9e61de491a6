"""What the default mode's integer products cost: perplexity beside fp32 compute on the same weights.

8,192 tokens of English of three kinds: a licence, Python's language reference, and this project's documentation. They
are copies in tests/data, so that an edited document does not move the measurement. A single stretch of 512 tokens
changes by -0.3 to +0.5 %, as near-ties fall one way or the other; the mean of sixteen by a quarter of that.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from support.paths import DATA
from support.teacher_forcing import log_probabilities, mean_loss

from fastinfer.models import load_model
from fastinfer.tokenizers.tokenizer import Tokenizer

STRETCH = 512
STRETCHES = 16
# Stretches of each text.
TEXTS = {"license": 4, "python_execution_model": 4, "python_import_system": 4, "project_documents": 4}


def stretches(tokenizer: Tokenizer) -> Iterator[list[int]]:
    for name, count in TEXTS.items():
        ids = tokenizer.encode((DATA / f"{name}.txt").read_text())
        assert len(ids) >= count * STRETCH
        for start in range(0, count * STRETCH, STRETCH):
            yield ids[start : start + STRETCH]


def test_default_mode_keeps_the_perplexity_of_fp32_within_half_a_percent(model_path: Path) -> None:
    default, tokenizer = load_model(model_path)
    reference, _ = load_model(model_path, "float32")
    losses, reference_losses = [], []
    with torch.inference_mode():
        for ids in stretches(tokenizer):
            losses.append(mean_loss(log_probabilities(default, ids, "auto"), ids))
            reference_losses.append(mean_loss(log_probabilities(reference, ids, "float32"), ids))
    assert len(losses) == STRETCHES
    assert 2.3 < sum(reference_losses) / STRETCHES < 4, "perplexity 10 to 55: the model understands these texts"
    change = math.expm1((sum(losses) - sum(reference_losses)) / STRETCHES)
    print(f"perplexity changes by {change:+.3%}")
    assert abs(change) <= 0.005, [f"{math.expm1(a - b):+.3%}" for a, b in zip(losses, reference_losses, strict=True)]
