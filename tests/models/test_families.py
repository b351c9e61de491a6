"""Every family of decoders against transformers, in fp32, on small random checkpoints."""

from pathlib import Path

import pytest
from support.families import FAMILIES, expected, load, save_model, some_tokens
from support.teacher_forcing import log_probabilities


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    reference = expected(save_model(tmp_path, family), some_tokens())
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
    assert (got.argmax(-1) == reference.argmax(-1)).float().mean() >= 0.99
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree
