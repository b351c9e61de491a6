"""Apertus: an activation whose factors are tensors of each layer, or metadata of a GGUF file."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, load, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities
from torch import Tensor
from torch.nn.functional import softplus

from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.activation import XIELU
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder
from fastinfer.models.mlp import PlainMLP

FACTORS = "model.layers.2.mlp.act_fn."


def load_gguf(file: GGUFFile) -> Decoder:
    return load_decoder(GGUFCheckpoint(file, exact=True), Precision.of("float32"), None)


def activations(model: Decoder) -> list[XIELU]:
    found = []
    for layer in model.layers:
        assert isinstance(layer.mlp, PlainMLP)
        assert isinstance(layer.mlp.activation, XIELU)
        found.append(layer.mlp.activation)
    return found


def test_each_layer_has_its_own_factors(tmp_path: Path) -> None:
    """Other ones than those that a new model has, also for beta and eps."""
    model = make_model("apertus-plain")
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.mlp.act_fn.beta.fill_(0.25 + index / 8)
            layer.mlp.act_fn.eps.fill_(-0.01 * index)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model)
    reference = expected(model, some_tokens())
    for loaded in (load(tmp_path), load_gguf(GGUFFile(tmp_path / "model.gguf"))):
        found = activations(loaded)
        assert len({each.positive for each in found}) == len({each.negative for each in found}) == len(found) == 4
        for each, layer in zip(found, model.model.layers, strict=True):
            own = layer.mlp.act_fn
            assert each.positive == pytest.approx(softplus(own.alpha_p).item(), rel=1e-6)
            assert each.negative == pytest.approx(each.beta + softplus(own.alpha_n).item(), rel=1e-6)
            assert (each.beta, each.eps) == (own.beta.item(), own.eps.item())
        assert (log_probabilities(loaded, some_tokens(), "float32") - reference).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("alpha_p", None, CheckpointFormatError, r"tensor 'model.layers.2.mlp.act_fn.alpha_p' is missing"),
        ("beta", None, CheckpointFormatError, r"tensor 'model.layers.2.mlp.act_fn.beta' is missing"),
        ("alpha_n", lambda values: values.expand(2), CheckpointFormatError, r"must have the shape \[1\], got \[2\]"),
        ("alpha_n", lambda values: values * torch.inf, UnsupportedModelError, "expected finite numbers, of which the"),
        ("beta", lambda values: values * torch.nan, UnsupportedModelError, "expected finite numbers, of which the"),
        ("eps", lambda values: -values, UnsupportedModelError, "xielu_eps: expected finite numbers, of which the last"),
        ("eps", lambda values: 2e6 * values, UnsupportedModelError, r"the last one is in -1 .. 0, got \["),
    ],
)
def test_bad_tensors(
    name: str, change: Callable[[Tensor], Tensor] | None, error: type[FastinferError], message: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "apertus-plain")
    tensors = load_file(tmp_path / "model.safetensors")
    values = tensors.pop(FACTORS + name)
    if change is not None:
        tensors[FACTORS + name] = change(values).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(error, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "metadata key 'xielu.alpha_p' is missing"),
        ("0.8", "'xielu.alpha_p': expected float, got '0.8'"),
        (np.zeros(3, np.float32), r"xielu.alpha_p: expected 4 numbers, one for each layer, got \[0.0, 0.0, 0.0\]"),
        (np.zeros(4, np.int32), r"xielu.alpha_p: expected 4 numbers, one for each layer, got \[0, 0, 0, 0\]"),
    ],
)
def test_bad_metadata(value: object, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("apertus-plain"))
    file = GGUFFile(tmp_path / "model.gguf")
    file.metadata.pop("xielu.alpha_p")
    if value is not None:
        file.metadata["xielu.alpha_p"] = value  # type: ignore[assignment]
    with pytest.raises(GGUFFormatError, match=message):
        load_gguf(file)


def test_a_number_for_all_layers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("apertus-plain"))
    file = GGUFFile(tmp_path / "model.gguf")
    file.metadata |= {"xielu.alpha_p": 0.75, "xielu.eps": 0}
    found = activations(load_gguf(file))
    assert {each.positive for each in found} == {softplus(torch.tensor(0.75)).item()}
    assert {each.eps for each in found} == {0.0}


def test_the_scaling_of_rotations_is_needed(tmp_path: Path) -> None:
    """Without it transformers takes that of the published models."""
    save_model(tmp_path, "apertus")
    path = tmp_path / "config.json"
    assert read_hf_config(path).rope_scaling.kind == "llama3"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointFormatError, match="rope_parameters is missing"):
        read_hf_config(path)
