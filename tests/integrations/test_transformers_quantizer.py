"""``from_pretrained(..., quantization_config=FastinferConfig(...))``: what is quantised, saved and loaded again."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    core_model_loading,
)
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.utils import logging

from fastinfer.integrations.transformers import FastinferConfig, register, replace
from fastinfer.integrations.transformers.quantizer import FastinferQuantizer
from fastinfer.nn import QuantLinear

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    logging.disable_progress_bar()
    with torch.no_grad():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "dense", LlamaConfig(**SIZES))


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, *args: Any, **kwargs: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, *args, **kwargs)


def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


def layers(model: PreTrainedModel) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def assert_same_state(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "int8", "nf4"])
def test_is_what_quantising_the_loaded_model_makes(kind: str, dtype: torch.dtype, folder: Path) -> None:
    model = load(folder, dtype=dtype, quantization_config=FastinferConfig(kind))
    assert len(layers(model)) == 14
    assert all(layer.kind == kind for layer in layers(model).values())
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    replaced = load(folder, dtype=dtype)
    replace(replaced, quantize=kind, lm_head=None, fuse=False)
    assert_same_state(model, replaced)
    dense = load(folder, dtype=dtype)
    for name, layer in layers(model).items():
        torch.testing.assert_close(layer.dequantize(), dense.get_submodule(name).weight.float(), rtol=0, atol=0.3)
    model.set_attn_implementation("fastinfer")
    torch.testing.assert_close(logits(model), logits(replaced), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen2Config(**SIZES, tie_word_embeddings=True)])
@pytest.mark.parametrize("lm_head", [None, "int8"])
@pytest.mark.parametrize("kind", ["int4", "int8", "nf4"])
def test_saved_and_loaded_is_the_same(kind: str, lm_head: str | None, config: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "dense", config)
    model = load(folder, quantization_config=FastinferConfig(kind, lm_head=lm_head, activation_bits=16))
    model.save_pretrained(tmp_path / "quantised")
    again = load(tmp_path / "quantised")
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    assert [str(layer) for layer in layers(again).values()] == [str(layer) for layer in layers(model).values()]
    assert {layer.activation_bits for layer in layers(again).values()} == {16}
    again.save_pretrained(tmp_path / "again")
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("quantised", "again")]
    assert tensors[0].keys() == tensors[1].keys()
    assert not any(name.endswith("proj.weight") for name in tensors[0])
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_settings_are_in_the_configuration_file(folder: Path, tmp_path: Path) -> None:
    config = FastinferConfig("int8", group_size=32, modules_to_not_convert=["down_proj"])
    load(folder, quantization_config=config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fastinfer",
        "kind": "int8",
        "group_size": 32,
        "activation_bits": 8,
        "modules_to_not_convert": ["down_proj"],
        "lm_head": None,
    }
    read = AutoQuantizationConfig.from_pretrained(tmp_path)
    assert isinstance(read, FastinferConfig)
    assert read.to_dict() == config.to_dict()


@pytest.mark.parametrize("tie", [False, True])
def test_output_layer(tie: bool, tmp_path: Path) -> None:
    folder = save(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=tie))
    plain = load(folder, quantization_config=FastinferConfig())
    assert "lm_head" not in layers(plain)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tie
    model = load(folder, quantization_config=FastinferConfig(lm_head="int8"))
    head = layers(model)["lm_head"]
    assert (head.kind, head.activation_bits) == ("int8", 16)
    dense = load(folder)
    torch.testing.assert_close(head.dequantize(), dense.lm_head.weight, rtol=0, atol=0.01)
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert not model.config.tie_word_embeddings
    model.tie_weights()
    assert isinstance(model.lm_head, QuantLinear)
    skipped = load(folder, quantization_config=FastinferConfig(lm_head="int8", modules_to_not_convert=["lm_head"]))
    assert "lm_head" not in layers(skipped)


def test_biases_are_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path / "dense", Qwen2Config(**SIZES))
    dense = load(folder)
    for name, parameter in dense.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    dense.save_pretrained(folder)
    model = load(folder, quantization_config=FastinferConfig("int8", activation_bits=32))
    biases = [name for name in dense.state_dict() if name.endswith("bias")]
    assert len(biases) == 6
    assert all(torch.equal(model.state_dict()[name], dense.state_dict()[name]) for name in biases)
    model.save_pretrained(tmp_path / "quantised")
    assert torch.equal(logits(load(tmp_path / "quantised")), logits(model))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(device_map: Any, folder: Path, tmp_path: Path) -> None:
    model = load(folder, device_map=device_map, quantization_config=FastinferConfig("nf4"))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, device_map=device_map)), logits(model))


@pytest.mark.parametrize("device_map", [{"model": 0, "lm_head": "cpu"}, {"": "disk"}])
def test_refuses_to_split_a_model(device_map: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValueError, match="device_map must be the CPU alone or GPUs alone"):
        load(folder, device_map=device_map, quantization_config=FastinferConfig())


def test_holds_one_dense_weight_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a weight is quantised, those before it are gone and those after it not yet read."""
    most, read = 0, []
    materialize, quantize = core_model_loading._materialize_copy, QuantLinear.quantize

    def watched_read(*args: Any) -> Tensor:
        weight = materialize(*args)
        read.append(weakref.ref(weight))
        return weight

    def watched_quantize(layer: QuantLinear, weight: Tensor) -> None:
        nonlocal most
        dense = [t for reference in read if (t := reference()) is not None and t.dim() == 2 and len(t) != 99]
        most = max(most, len(dense))
        quantize(layer, weight)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", watched_read)
    monkeypatch.setattr(QuantLinear, "quantize", watched_quantize)
    load(folder, quantization_config=FastinferConfig())
    assert most == 1


def test_layers_that_no_kernel_takes_stay_dense(tmp_path: Path) -> None:
    folder = save(tmp_path / "dense", LlamaConfig(**SIZES | {"intermediate_size": 100}))
    with pytest.warns(
        UserWarning, match="not a multiple of 32 stay dense: model.layers.0.mlp.down_proj, model.layers.1.mlp.down"
    ) as seen:
        model = load(folder, quantization_config=FastinferConfig())
    assert sum("multiple of 32" in str(warning.message) for warning in seen) == 1
    assert len(layers(model)) == 12
    model.save_pretrained(tmp_path / "quantised")
    with pytest.warns(UserWarning, match="not a multiple of 32"):
        again = load(tmp_path / "quantised")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "int3"}, "kind must be int4, int8, nf4, got 'int3'"),
        ({"lm_head": "fp8"}, "lm_head must be int4, int8, nf4, got 'fp8'"),
        ({"group_size": 48}, "group_size must be a multiple of 32, got 48"),
        ({"group_size": 0}, "group_size must be a multiple of 32, got 0"),
        ({"activation_bits": 4}, "activation_bits must be 8, 16 or 32, got 4"),
        ({"quant_method": "awq"}, "quant_method must be 'fastinfer', got 'awq'"),
    ],
)
def test_refuses_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastinferConfig(**arguments)


def test_group_size_is_checked_before_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match=r"down_proj cannot be quantised: group_size must .* got 64 for 96"):
        LlamaForCausalLM.from_pretrained(folder, dtype="float32", quantization_config=FastinferConfig(group_size=64))


@pytest.mark.parametrize("kind", ["int4", "int8", "nf4"])
def test_replace_joins_quantised_layers_as_they_are(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "dense", Qwen2Config(**SIZES))
    model = load(folder, quantization_config=FastinferConfig(kind, activation_bits=32))
    before, state = logits(model), {name: values.clone() for name, values in model.state_dict().items()}
    report = replace(model)
    assert report.kept == {"lm_head": ("Linear", "keeps its dense weight")}
    assert report.replaced["model.layers.0.self_attn"] == ("Qwen2Attention", f"Attention ({kind})")
    assert report.replaced["model.layers.1.mlp"] == ("Qwen2MLP", f"FusedMLP ({kind})")
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)
    model.save_pretrained(tmp_path / "joined")
    again = load(tmp_path / "joined")
    torch.testing.assert_close(logits(again), before, rtol=0, atol=0)


def test_replace_keeps_what_was_quantised_otherwise(folder: Path) -> None:
    model = load(folder, quantization_config=FastinferConfig(modules_to_not_convert=["k_proj", "down_proj"]))
    before = logits(model)
    report = replace(model)
    reason = "layers must all be quantised in one way, got ('int4', 32, 8), dense"
    assert report.kept["model.layers.0.self_attn"] == ("LlamaAttention", reason)
    assert report.replaced["model.layers.0.mlp"] == ("LlamaMLP", "FusedMLP (int4)")
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0.05)


def test_replace_quantises_the_output_layer_alone(folder: Path) -> None:
    model = load(folder, quantization_config=FastinferConfig("int8"))
    report = replace(model, quantize="int4", lm_head="int8")
    assert report.replaced["lm_head"] == ("Linear", "QuantLinear (int8)")
    assert {layer.kind for layer in layers(model).values()} == {"int8"}


def test_dequantize(folder: Path) -> None:
    model = load(folder, quantization_config=FastinferConfig("int8", activation_bits=32, lm_head="int8"))
    before = logits(model)
    model.dequantize()
    assert not layers(model)
    assert not model.is_quantized
    assert not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)
    joined = load(folder, quantization_config=FastinferConfig())
    replace(joined)
    with pytest.raises(ValueError, match=r"merged cannot be dequantised, got model.layers.0.self_attn"):
        joined.dequantize()


def test_answers(folder: Path) -> None:
    model = load(folder, quantization_config=FastinferConfig())
    quantizer = model.hf_quantizer
    assert (quantizer.is_trainable, quantizer.is_serializable(), quantizer.is_compileable) == (False, True, True)
    before = logits(model)
    compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 5, 64)
    assert torch.equal(compiled(x), model.model.layers[0].mlp(x))
    assert torch.equal(logits(model), before)


def test_registering_twice_does_no_harm() -> None:
    register()
    register()
    quantizer = AutoHfQuantizer.from_config(FastinferConfig(), pre_quantized=False)
    assert isinstance(quantizer, FastinferQuantizer)
