"""Whole models quantised and read back: what was folded away is in the file, and nothing else has changed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.families import load, save_model, some_tokens
from support.teacher_forcing import log_probabilities

from fastinfer.errors import FastinferError, QuantizationError, RequestError, UnsupportedModelError
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.quantize.methods import SYMMETRIC, Method

# Every way in which rows are stored, joined and scaled: fused, with biases, with offset norms, with heads to fold into.
MODELS = ("llama2", "llama-biases", "qwen3", "gemma3", "phi3")
# Of the spread of log-probabilities: what rounding of weights, and of inputs too, may change.
LIMITS = {"rtn": 0.04, "gptq": 0.04, "awq": 0.04, "int8": 0.04, "w8a8": 0.08}


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (96,), generator=generator).tolist() for _ in range(8)]


def method(name: str, bits: int, group_size: int = 32) -> Method:
    return Method(name, bits, group_size, name in SYMMETRIC)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("family", MODELS)
def test_8_bits_change_little(family: str, name: str, tmp_path: Path) -> None:
    """With 8 bits a factor that went astray would stand out."""
    save_model(tmp_path / "model", family)
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", method(name, 8), texts())
    before, after = (load(tmp_path / folder) for folder in ("model", "out"))
    ids = some_tokens()
    expected, got = (log_probabilities(model, ids, "float32") for model in (before, after))
    assert (got - expected).abs().mean() < LIMITS[name] * expected.std()
    assert max(report.errors.values()) < 1e-3
    assert len(report.errors) == 4 * before.config.num_layers
    assert report.bytes_after < report.bytes_before


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_calibrated_methods_are_better_than_rounding(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama2")
    errors = {}
    for way in ("rtn", name):
        report = quantize_checkpoint(
            tmp_path / "model", tmp_path / way, method(way, 3 if name == "awq" else 4), texts()
        )
        errors[way] = sum(report.errors.values())
    assert errors[name] < 0.9 * errors["rtn"]


def test_nf4_reads_back(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama2", max_shard_size="200KB")
    with pytest.raises(RequestError, match="64 does not divide 96"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", method("nf4", 4, 64), texts())
    assert not (tmp_path / "out").exists()


def test_what_is_not_quantised_stays(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", method("gptq", 4), texts())
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    kept = {name for name in before if "proj" not in name}
    assert kept <= after.keys()
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not any(f"{name}" in after for name in before.keys() - kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"


def test_refusals(tmp_path: Path) -> None:
    save_model(tmp_path / "mixture", "mixtral")
    save_model(tmp_path / "gpt2", "gpt2")
    save_model(tmp_path / "model", "llama2")
    quantize_checkpoint(tmp_path / "model", tmp_path / "quantized", method("rtn", 4), texts())
    cases: list[tuple[str, Method, list[list[int]], type[FastinferError], str]] = [
        ("mixture", method("rtn", 4), texts(), UnsupportedModelError, "mixtures of experts"),
        ("gpt2", method("rtn", 4), texts(), UnsupportedModelError, "transposed"),
        ("quantized", method("rtn", 4), texts(), UnsupportedModelError, "quantised already"),
        ("model", method("gptq", 4, 128), texts(), RequestError, "128 does not divide 64"),
        ("model", method("gptq", 4), [], RequestError, "gptq needs a calibration text"),
    ]
    for folder, how, given, error, message in cases:
        with pytest.raises(error, match=message):
            quantize_checkpoint(tmp_path / folder, tmp_path / "out", how, given)
        assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(QuantizationError, match="expected a new or empty folder"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "full", method("rtn", 4), texts())
