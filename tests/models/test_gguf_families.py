"""GGUF files of every family against the models of transformers that they were made from, in fp32."""

from pathlib import Path

import pytest
from support.families import expected, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.loader import load_decoder

FAMILIES = (
    "llama2",
    "qwen2-plain",
    "qwen3",
    "gemma2-plain",
    "gemma3-plain",
    "phi3",
    "gpt2",
    "mixtral",
    "qwen3-moe-renormalized",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    reference = expected(model, some_tokens())
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
    assert (got.argmax(-1) == reference.argmax(-1)).float().mean() >= 0.99
