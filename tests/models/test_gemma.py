"""Gemma 3 270M, the real file, against transformers in fp32: Q4_K, Q5_0, Q6_K and Q8_0 weights, windows, two rotary
bases, norms of heads and after layers, a scaled embedding of 262,144 tokens."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import DATA
from support.teacher_forcing import log_probabilities, mean_loss
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastinfer import hub
from fastinfer.errors import ModelNotFoundError
from fastinfer.models import load_model

TOKENS = 640  # past the window of 512


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return hub.resolve("gemma3-270m")
    except ModelNotFoundError as error:  # no network, and never fetched
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ids(path: Path) -> list[int]:
    _, tokenizer = load_model(path)
    return tokenizer.encode((DATA / "license.txt").read_text())[:TOKENS]


@pytest.fixture(scope="module")
def expected(path: Path, ids: list[int]) -> Tensor:
    original: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        logits = original(torch.tensor([ids])).logits[0]
    del original
    gc.collect()
    return logits.log_softmax(-1)


def test_fp32_agrees(path: Path, ids: list[int], expected: Tensor) -> None:
    model, _ = load_model(path, "float32", max_model_len=TOKENS)
    got = log_probabilities(model, ids, "float32")
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.99
    assert (got - expected).abs().max() < 5e-3


def test_default_mode_stays_near(path: Path, ids: list[int], expected: Tensor) -> None:
    model, _ = load_model(path, max_model_len=TOKENS)
    got = log_probabilities(model, ids, "auto")
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95
    assert abs(np.expm1(mean_loss(got, ids) - mean_loss(expected, ids))) < 0.02
