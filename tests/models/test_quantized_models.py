"""Models of every quantised format, against transformers with the numbers for which they stand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, some_tokens
from support.packed_layers import compressed_config
from support.quantized_models import (
    Packed,
    Packer,
    edit_config,
    fp8,
    fp8_by_output,
    gptq,
    mxfp4,
    nvfp4,
    save_quantized_model,
)
from support.teacher_forcing import log_probabilities

from fastinfer.cli.memory_bounds import Weights
from fastinfer.errors import CheckpointFormatError
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

# The last is left out by name.
DENSE = ("embed_tokens", "embed_in", "embed_out", "lm_head", ".gate", "layers.1.self_attn.k_proj")


def fp8_settings(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return compressed_config("float-quantized", weights, inputs)


def fp4_settings(format: str, strategy: str, group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group_size}
    return compressed_config(format, {**weights, "dynamic": False}, {**weights, "dynamic": "local"})


def renamed(packer: Packer, **names: str) -> Packer:
    """The same with other names of some tensors."""

    def pack(weight: torch.Tensor) -> Packed:
        tensors, meant = packer(weight)
        return {names.get(name, name): tensor for name, tensor in tensors.items()}, meant

    return pack


QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "is_dynamic": True},
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "dynamic": {"-:.*k_proj": {}}}
FORMATS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "fp8 block": (fp8((48, 80), "weight_scale_inv"), {**FP8, "weight_block_size": [48, 80], "scale_fmt": "ue8m0"}),
    "fp8 tensor": (fp8(None, "weight_scale_inv"), {**FP8, "activation_scheme": "static"}),
    "fp8 autofp8": (fp8(None, "weight_scale", (1,)), {**FP8, "activation_scheme": "static"}),
    "ct fp8 channel": (fp8_by_output("weight_scale"), fp8_settings("channel")),
    "ct fp8 tensor": (fp8(None, "weight_scale", (1,)), fp8_settings("tensor")),
    "ct fp8 block": (fp8((48, 80), "weight_scale"), fp8_settings("block", block_structure=[48, 80])),
    "ct nvfp4": (nvfp4(False), fp4_settings("nvfp4-pack-quantized", "tensor_group", 16)),
    "ct mxfp4": (mxfp4, fp4_settings("mxfp4-pack-quantized", "group", 32)),
    "modelopt nvfp4": (nvfp4(True), {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "modelopt fp8": (fp8(None, "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fbgemm_fp8": (fp8_by_output("weight_scale"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "quark mxfp4": (renamed(mxfp4, weight_packed="weight"), QUARK),
    "gptq": (gptq(4, 64, -1), GPTQ),
}


def log_probs(folder: Path) -> torch.Tensor:
    decoder = load_decoder(HFCheckpoint(folder, exact=True), Precision.of("float32"), None)
    return log_probabilities(decoder, some_tokens(), "float32")


def assert_like(folder: Path, model: Any) -> None:
    got, reference = log_probs(folder), expected(model, some_tokens())
    assert (got - reference).abs().max() < 1e-4 * max(1.0, float(reference.std()))
    assert len(set(got.argmax(-1).tolist())) > 5  # else everything would agree


def layers_by(packer: Packer) -> Callable[[str], Packer | None]:
    return lambda module: None if module.endswith(DENSE) else packer


@pytest.mark.parametrize("family", ["qwen3-moe", "phi3", "gpt-neox"])
@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str, family: str, tmp_path: Path) -> None:
    """Experts among the matrices, or fused ones, whose rows may be those of each head together."""
    packer, settings = FORMATS[form]
    sizes = {"moe_intermediate_size": 64} if family == "qwen3-moe" else {}
    model = save_quantized_model(tmp_path, family, layers_by(packer), **sizes)
    if "ignore" in settings:
        settings = {**settings, "ignore": ["lm_head", "re:.*gate$", "model.layers.1.self_attn.k_proj"]}
    edit_config(tmp_path, quantization_config=settings)
    assert_like(tmp_path, model)


def test_names_of_schemes_that_do_not_fit(tmp_path: Path) -> None:
    """The language model within another has other names in memory than in the file; the tensors count."""
    packer, settings = FORMATS["ct fp8 channel"]
    model = save_quantized_model(tmp_path, "llama2", layers_by(packer))
    names = ["lm_head", "model.language_model.layers.1.self_attn.k_proj"]
    edit_config(tmp_path, quantization_config={**settings, "ignore": names})
    assert_like(tmp_path, model)


def test_settings_of_model_optimizer_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = save_quantized_model(tmp_path, "llama2", layers_by(nvfp4(True)))
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    assert_like(tmp_path, model)
    path.write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"hf_quant_config.json: quantization is missing"):
        HFCheckpoint(tmp_path)


def test_a_mixture_of_fp8_and_fp4(tmp_path: Path) -> None:
    def pack(module: str) -> Packer | None:
        return None if module.endswith(DENSE) else fp8(None, "weight_scale") if "attn" in module else nvfp4(True)

    model = save_quantized_model(tmp_path, "llama2", pack)
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    edit_config(tmp_path, quantization_config=settings)
    assert_like(tmp_path, model)


def test_settings_of_single_layers_by_autoround(tmp_path: Path) -> None:
    """By name or pattern, the name first; two of a layer whose bits differ are not joined."""
    names = {"model.layers.0.mlp.down_proj": gptq(8, 64, 0), "model.layers.2.mlp.down_proj": gptq(2, 64, 0)}

    def pack(module: str) -> Packer | None:
        if module.endswith(DENSE):
            return None
        return names.get(module) or gptq(8 if "down_proj" in module else 4, 32 if "down_proj" in module else 64, 0)

    model = save_quantized_model(tmp_path, "llama2", pack)
    layers = {
        "model.layers.0.mlp.down_proj": {"bits": 8},
        "model.layers.2.mlp.down_proj": {"bits": 2, "group_size": 64},
        ".*down_proj": {"bits": 8, "group_size": 32},
        "model.layers.1.self_attn.k_proj": {"bits": 16, "data_type": "fp"},
    }
    settings = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 64}
    edit_config(tmp_path, quantization_config={**settings, "data_type": "int", "extra_config": layers})
    assert_like(tmp_path, model)


@pytest.mark.parametrize("form", ["gptq", "fp8 tensor", "ct nvfp4"])
def test_quantised_output_layer(form: str, tmp_path: Path) -> None:
    """It is not taken for a missing one, in whose place the embedding would be used."""
    packer, settings = FORMATS[form]
    model = save_quantized_model(tmp_path, "llama2", lambda module: None if "embed" in module else packer)
    edit_config(tmp_path, quantization_config={**settings, **({"ignore": []} if "ignore" in settings else {})})
    assert "lm_head" in HFCheckpoint(tmp_path)
    assert_like(tmp_path, model)


def test_scales_for_inputs_of_awq_are_refused(tmp_path: Path) -> None:
    save_quantized_model(tmp_path, "llama2", layers_by(nvfp4(True)))
    edit_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(128)}, path)
    with pytest.raises(Exception, match=r"up_proj': 'pre_quant_scale' \(AWQ\) is not implemented"):
        log_probs(tmp_path)


SIZES: dict[str, tuple[Packer | None, dict[str, Any]]] = {
    "dense": (None, {}),
    **{form: FORMATS[form] for form in ("fp8 block", "ct nvfp4", "ct mxfp4", "modelopt nvfp4", "gptq")},
    "gptq 2 bits": (gptq(2, 64, -1), {**GPTQ, "bits": 2}),
    "gptq 3 bits": (gptq(3, 64, -1), {**GPTQ, "bits": 3}),
}


@pytest.mark.parametrize("form", SIZES)
def test_sizes_in_memory(form: str, tmp_path: Path) -> None:
    """They are known before the weights are loaded, but for padding, tables, and the scales of large groups."""
    packer, settings = SIZES[form]
    save_quantized_model(tmp_path, "llama2", lambda module: None if module.endswith(DENSE) else packer)
    if settings:
        edit_config(tmp_path, quantization_config=settings)
    checkpoint = HFCheckpoint(tmp_path)
    tables = Weights.of(checkpoint).memory_bytes - rotary_bytes(checkpoint.config)
    assert checkpoint.weight_bytes("cpu") == pytest.approx(tables, rel=0.1)


def rotary_bytes(config: ModelConfig) -> int:
    return config.max_position * config.rotary_dim * 4
