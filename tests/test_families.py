"""Every family of decoders against transformers, in fp32, on small random checkpoints."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, save_model
from teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

TOKENS = 150  # past every window, and past the length that the scaled ones were trained on


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_decoder(HFCheckpoint(folder), Precision.of(dtype), None)


def some_tokens() -> list[int]:
    return torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()


def expected(model: object, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    reference = expected(save_model(tmp_path, family), some_tokens())
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
    assert (got.argmax(-1) == reference.argmax(-1)).float().mean() >= 0.99
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree
