"""Folders as published checkpoints are: they are read like those that transformers writes."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.families import expected, load, make_model, some_tokens
from support.gguf_families import GGUF_FAMILIES
from support.published import changed_by_publishing, publish
from support.teacher_forcing import log_probabilities

from fastinfer.models.hf_config import read_hf_config


@pytest.mark.parametrize("family", [family for family in GGUF_FAMILIES if changed_by_publishing(family)])
def test_configuration(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    before = read_hf_config(tmp_path / "config.json")
    publish(tmp_path, family)
    after = read_hf_config(tmp_path / "config.json")
    assert replace(after, architecture=before.architecture) == before


def test_dense_layers_of_kimi_linear(tmp_path: Path) -> None:
    """Their tensors have the names of a mixture of experts in transformers alone."""
    model = make_model("kimi-linear-plain")
    model.save_pretrained(tmp_path)
    publish(tmp_path, "kimi-linear-plain")
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
