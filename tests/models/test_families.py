"""Every family of decoders against transformers, in fp32, on small random checkpoints; also with shared weights."""

from pathlib import Path

import pytest
from support.families import FAMILIES, expected, load, save_model, some_tokens
from support.helpers import assert_bitwise
from support.teacher_forcing import log_probabilities

from fastinfer.models.shared_model import read_model, write_model
from fastinfer.utils.sealed_memory import SealedMemory


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    reference = expected(save_model(tmp_path, family), some_tokens())
    model = load(tmp_path)
    got = log_probabilities(model, some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
    assert (got.argmax(-1) == reference.argmax(-1)).float().mean() >= 0.99
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree
    memory = SealedMemory.create()
    write_model(model, "", memory)
    shared, _ = read_model(memory)  # whose memory ends a process that writes to it
    assert_bitwise(log_probabilities(shared, some_tokens(), "float32"), got)
