"""Gemma 3 270M, the real file, against transformers in fp32: Q4_K, Q5_0, Q6_K and Q8_0 weights, windows, two rotary
bases, norms of heads and after layers, a scaled embedding of 262,144 tokens.

transformers' log-probabilities are in tests/data/gemma3_270m.npz, written by tests/support/make_golden.py: reading the
file with it takes a minute. They are those of the 8 most likely tokens at every position and of 8 random ones.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paths import DATA
from support.teacher_forcing import log_probabilities, mean_loss
from support.texts import GEMMA_TOKENS, license_ids
from torch import Tensor

from fastinfer import hub
from fastinfer.errors import ModelNotFoundError
from fastinfer.models import load_model

pytestmark = pytest.mark.slow


@dataclass
class Golden:
    """transformers' results; the most likely token at each position comes first."""

    tokens: Tensor
    log_probs: Tensor
    loss: float


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return hub.resolve("gemma3-270m")
    except ModelNotFoundError as error:  # no network, and never fetched
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ids(path: Path) -> list[int]:
    _, tokenizer = load_model(path)
    return license_ids(tokenizer)[:GEMMA_TOKENS]


@pytest.fixture(scope="module")
def expected() -> Golden:
    with np.load(DATA / "gemma3_270m.npz") as file:
        return Golden(torch.from_numpy(file["tokens"]).long(), torch.from_numpy(file["log_probs"]), float(file["loss"]))


def test_fp32_agrees(path: Path, ids: list[int], expected: Golden) -> None:
    model, _ = load_model(path, "float32", max_model_len=GEMMA_TOKENS)
    got = log_probabilities(model, ids, "float32")
    assert got.shape[0] == len(expected.tokens) == GEMMA_TOKENS
    assert (got.argmax(-1) == expected.tokens[:, 0]).float().mean() >= 0.99
    assert (got.gather(1, expected.tokens) - expected.log_probs).abs().max() < 5e-3


def test_default_mode_stays_near(path: Path, ids: list[int], expected: Golden) -> None:
    model, _ = load_model(path, max_model_len=GEMMA_TOKENS)
    got = log_probabilities(model, ids, "auto")
    assert (got.argmax(-1) == expected.tokens[:, 0]).float().mean() >= 0.95
    assert abs(np.expm1(mean_loss(got, ids) - expected.loss)) < 0.02
