"""Whole models quantised and read back: what was folded away is in the file, and nothing else has changed."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import load, make_model, save_model, some_tokens
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import FastinferError, QuantizationError, RequestError, UnsupportedModelError
from fastinfer.models.checkpoint import split_name
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.quantize import calibration
from fastinfer.quantize.calibration import CalibratedWeight
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.quantize.methods import SYMMETRIC, Method
from fastinfer.weights.expert_weights import DenseExperts
from fastinfer.weights.weight import DenseWeight

# Every way in which rows are stored, joined and scaled: fused, with biases, with offset norms, with heads to fold into.
MODELS = ("llama2", "llama-biases", "qwen3", "gemma3", "gemma4-wide", "phi3")
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
    assert max(report.errors.values()) < 0.03
    assert len(report.errors) == (6 if before.config.per_layer_size else 4) * before.config.num_layers
    assert report.bytes_after < report.bytes_before


# Shared experts with a gate of their own and without, some dense layers, and a bias of the choice.
MIXTURES = {
    "mixtral": {},
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "glm4-moe": {"moe_intermediate_size": 64, "use_qk_norm": False},
}


@pytest.mark.parametrize("name", [*LIMITS, "nf4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts(family: str, name: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 128} if name == "nf4" else {}
    if name == "nf4" and family == "qwen2-moe":
        sizes["shared_expert_intermediate_size"] = 128
    model = make_model(family, **MIXTURES[family] | sizes)
    model.save_pretrained(tmp_path / "model")
    how = method(name, 4, 64) if name == "nf4" else method(name, 8)
    report = quantize_checkpoint(tmp_path / "model", tmp_path / "out", how, texts())
    before, after = (load(tmp_path / folder) for folder in ("model", "out"))
    is_mixture = [isinstance(layer.mlp, MixtureOfExperts) for layer in after.layers]
    index = is_mixture.index(True)
    mixture = after.layers[index].mlp
    assert isinstance(mixture, MixtureOfExperts)
    assert not isinstance(mixture.gate_up, DenseExperts)
    assert not isinstance(mixture.down, DenseExperts)
    assert isinstance(mixture.router, DenseWeight)
    assert len(report.errors) == sum(4 + 2 * (flag and family != "mixtral") for flag in is_mixture)
    expected, got = (log_probabilities(model, some_tokens(), "float32") for model in (before, after))
    # A token whose experts are others differs more, so the median stands for those whose are not.
    limit = {"nf4": 0.6, "w8a8": 0.12}.get(name, 0.04)
    assert (got - expected).abs().median() < limit * expected.std()
    assert max(report.errors.values()) < (0.14 if name == "nf4" else 0.03)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    left_out = config.get("ignore") or config.get("llm_int8_skip_modules")
    if name in ("int8", "w8a8", "nf4"):
        assert left_out is not None
        assert f"model.layers.{index}." in "".join(left_out)
        assert all(f"{module}.weight" in load_file(tmp_path / "out" / "model.safetensors") for module in left_out[1:])


def test_experts_that_no_token_chooses(tmp_path: Path) -> None:
    """They are rounded to nearest, and others are not."""
    make_model("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    tensors[gate] = torch.zeros_like(tensors[gate])  # of equal experts the first ones are chosen
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    for name in ("rtn", "gptq"):
        quantize_checkpoint(tmp_path / "model", tmp_path / name, method(name, 4), texts())
    rounded, calibrated = (load_file(tmp_path / name / "model.safetensors") for name in ("rtn", "gptq"))
    for expert in range(4):
        for matrix in ("w1", "w2", "w3"):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.qweight"
            assert torch.equal(rounded[name], calibrated[name]) == (expert >= 2)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_calibrated_methods_are_better_than_rounding(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama2")
    errors = {}
    for way in ("rtn", name):
        report = quantize_checkpoint(
            tmp_path / "model", tmp_path / way, method(way, 3 if name == "awq" else 4), texts()
        )
        errors[way] = sum(report.errors.values())
    assert errors[name] < 0.95 * errors["rtn"]


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


NUMBERS = [(name, value) for name in (*LIMITS, "nf4") for value in (float("nan"), float("inf"))]
NUMBERS += [(name, 1e30) for name in ("rtn", "gptq", "awq", "int8")]  # whose scales are fp16


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_numbers_that_no_format_holds_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    make_model("llama2", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    how = method(name, 4, 64) if name == "nf4" else method(name, 8)
    for given in [texts()] if how.needs_inputs else [texts(), []]:
        with pytest.raises(QuantizationError, match=r"^layer 'layers\.1\.gate_proj, layers\.1\.up_proj': expected"):
            quantize_checkpoint(tmp_path / "model", tmp_path / "out", how, given)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("with_texts", [False, True])
def test_one_layer_is_in_memory_at_a_time(with_texts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its weights is there once in fp32."""
    save_model(tmp_path / "model", "llama2")
    layers, sizes = set(), []

    def watch(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def watched(*args: Any) -> Any:
            result = function(*args)
            gc.collect()
            alive = [weight for weight in gc.get_objects() if isinstance(weight, CalibratedWeight)]
            layers.add(len({split_name(weight.names[0])[0] for weight in alive}))
            fields = [value for weight in alive for value in vars(weight).values() if isinstance(value, Tensor)]
            sizes.append(sum(value.nbytes for value in fields))
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(calibration._CalibratedReader, "weight")
    watch(CalibratedWeight, "_quantized")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", method("rtn", 4), texts() if with_texts else [])
    config = HFCheckpoint(tmp_path / "model").config
    rows = 2 * config.q_size(0) + 2 * config.kv_size(0) + 3 * config.mlp_size(0)
    assert layers == {1}
    assert max(sizes) == 4 * rows * config.hidden_size


def test_refusals(tmp_path: Path) -> None:
    save_model(tmp_path / "gpt2", "gpt2")
    save_model(tmp_path / "model", "llama2")
    quantize_checkpoint(tmp_path / "model", tmp_path / "quantized", method("rtn", 4), texts())
    cases: list[tuple[str, Method, list[list[int]], type[FastinferError], str]] = [
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
    with pytest.raises(RequestError, match="out: expected a new or empty folder"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "full", method("rtn", 4), texts())
