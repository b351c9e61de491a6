"""Layers that bitsandbytes and compressed-tensors have packed themselves, against their own dequantisation.

Neither library is needed otherwise; without them the tests of their layouts remain (test_quantized_layers.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.packed_layers import NAME, compressed_config
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from fastinfer.formats.quantized_checkpoint import read_linear
from fastinfer.formats.unpacked import Dense, Int8, Lut


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=["nf4-double", "nf4-bf16-storage", "fp4", "int8"],
)
def test_bitsandbytes_as_transformers_saves_it(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 100}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "a")
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path / "b")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        module = model.get_submodule(f"model.layers.0.{name}")
        expected = dequantize_bnb_weight(module.weight, getattr(module, "state", None))
        weight = read_linear(tensors, f"model.layers.0.{name}", saved)
        assert isinstance(weight, Int8 if "load_in_8bit" in options else Lut)
        torch.testing.assert_close(weight.dequantize(), expected.float(), rtol=1e-6, atol=0)
    assert isinstance(read_linear(tensors, "lm_head", saved), Dense)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group_size"), [("group", 64), ("channel", None)])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized(bits: int, strategy: str, group_size: int | None, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)
    groups = (torch.randn(40, 256) + 0.3).unflatten(1, (-1, group_size or 256))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    zeros = torch.zeros_like(low)
    scales = torch.maximum(-low, high) / (2 ** (bits - 1) - 0.5)
    if not symmetric:
        scales = (high - low) / (2**bits - 1)
        zeros = (-(2 ** (bits - 1)) - low / scales).round()
    stored = {"weight": groups.flatten(1), "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    check_compressed("pack-quantized", stored, args, None)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_int_quantized(strategy: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    weight = torch.randn(40, 256)
    largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
    inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    stored = {"weight": weight, "weight_scale": largest / 127}
    check_compressed("int-quantized", stored, QuantizationArgs(num_bits=8, strategy=strategy), inputs)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_float_quantized(strategy: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    weight = torch.randn(40, 256)
    largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
    block = None
    if strategy == "block":
        block = [16, 96]
        padded = torch.nn.functional.pad(weight.abs(), (0, 32, 0, 8))
        largest = padded.unflatten(1, (3, 96)).unflatten(0, (3, 16)).amax((1, 3))
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=block)
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    check_compressed("float-quantized", {"weight": weight, "weight_scale": largest / 448}, args, inputs)


def test_nvfp4() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    weight = torch.randn(40, 256)
    factor = 448 * 6 / weight.abs().max()[None]
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * factor).to(torch.float8_e4m3fn)
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    stored = {"weight": weight, "weight_scale": scales.float(), "weight_global_scale": factor}
    check_compressed("nvfp4-pack-quantized", stored, args, None)


def test_mxfp8() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    weight = torch.randn(40, 256)
    scales = 2 ** (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 448).log2().ceil()
    args = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    check_compressed("mxfp8-quantized", {"weight": weight, "weight_scale": scales}, args, None)


def check_compressed(format: str, stored: dict[str, torch.Tensor], weights: Any, inputs: Any) -> None:
    """The library packs the layer and gives it back; its settings go through their JSON form."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(stored, scheme)
    settings = [None if args is None else json.loads(args.model_dump_json()) for args in (weights, inputs)]
    tensors = {f"{NAME}.{part}": tensor for part, tensor in packed.items()}
    weight = read_linear(tensors, NAME, compressed_config(format, *settings))
    # w = s * q + min has one more rounding than s * (q - zero).
    expected = compressor.decompress(packed, scheme)["weight"]
    rounding = 2**-7 if expected.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(weight.dequantize(), expected.float(), rtol=rounding, atol=1e-6)
