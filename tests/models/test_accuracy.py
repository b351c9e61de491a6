"""What the default mode's integer products cost: perplexity beside fp32 compute on the same weights.

8,192 tokens of English of three kinds: a licence, Python's language reference, and this project's documentation. They
are copies in tests/data, so that an edited document does not move the measurement. A single stretch of 512 tokens
changes by -0.3 to +0.5 %, as near-ties fall one way or the other; the mean of sixteen by a quarter of that.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from support.paths import DATA
from support.teacher_forcing import log_probabilities, mean_loss
from support.texts import accuracy_stretches

from fastinfer.models import load_model

pytestmark = pytest.mark.slow

STRETCHES = 16


@pytest.fixture(scope="module")
def reference_losses() -> list[float]:
    """Losses in fp32, written by tests/support/make_golden.py."""
    losses: list[float] = json.loads((DATA / "accuracy_fp32.json").read_text())
    assert len(losses) == STRETCHES
    assert 2.3 < sum(losses) / STRETCHES < 4, "perplexity 10 to 55: the model understands these texts"
    return losses


def test_the_stored_losses_are_those_of_fp32(model_path: Path, reference_losses: list[float]) -> None:
    model, tokenizer = load_model(model_path, "float32")
    stretches = list(accuracy_stretches(tokenizer))
    with torch.inference_mode():
        for index in (0, STRETCHES - 1):
            loss = mean_loss(log_probabilities(model, stretches[index], "float32"), stretches[index])
            assert abs(loss - reference_losses[index]) < 1e-4


def test_default_mode_keeps_the_perplexity_of_fp32_within_half_a_percent(
    model_path: Path, reference_losses: list[float]
) -> None:
    model, tokenizer = load_model(model_path)
    with torch.inference_mode():
        losses = [mean_loss(log_probabilities(model, ids, "auto"), ids) for ids in accuracy_stretches(tokenizer)]
    change = math.expm1((sum(losses) - sum(reference_losses)) / STRETCHES)
    print(f"perplexity changes by {change:+.3%}")
    assert abs(change) <= 0.005, [f"{math.expm1(a - b):+.3%}" for a, b in zip(losses, reference_losses, strict=True)]
