"""Settings of quantised checkpoints that are refused, layers that are not quantised, and damaged ones."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.packed_layers import (
    NAME,
    Layer,
    awq_layer,
    bitsandbytes_layer,
    fbgemm_layer,
    float_quantized_layer,
    fp8_layer,
    gptq_layer,
    int8_layer,
    int_quantized_layer,
    mlx_float_layer,
    mlx_layer,
    modelopt_fp8_layer,
    mxfp4_layer,
    mxfp8_layer,
    nvfp4_layer,
    pack_quantized_layer,
    quark_layer,
)

from fastinfer.errors import CheckpointFormatError, FastinferError, UnsupportedModelError
from fastinfer.formats.compressed_tensors import CompressedTensorsFormat
from fastinfer.formats.linear_tensors import ExpertTensors, LinearTensors
from fastinfer.formats.quantized_checkpoint import PackedSizes, parse_quantization_config, read_linear
from fastinfer.formats.unpacked import Dense

LAYERS: dict[str, Callable[[], Layer]] = {
    "gptq": gptq_layer,
    "gptq act order": lambda: gptq_layer(act_order=True),
    "gptq 3 bits": lambda: gptq_layer(3),
    "gptq 8 bits": lambda: gptq_layer(8, symmetric=True),
    "awq": awq_layer,
    "nf4": bitsandbytes_layer,
    "fp4": lambda: bitsandbytes_layer("fp4", nested=False),
    "int8": int8_layer,
    "w4a16": pack_quantized_layer,
    "w4a16 asymmetric": lambda: pack_quantized_layer(symmetric=False, act_order=True),
    "w8a16": lambda: pack_quantized_layer(8),
    "w8a8": int_quantized_layer,
    "fp8": fp8_layer,
    "fp8 tensor": lambda: fp8_layer(block=None),
    "float-quantized": float_quantized_layer,
    "float-quantized block": lambda: float_quantized_layer("block"),
    "nvfp4": nvfp4_layer,
    "mxfp4": mxfp4_layer,
    "mxfp8": mxfp8_layer,
    "fbgemm_fp8": fbgemm_layer,
    "quark": lambda: quark_layer("mxfp4"),
    "quark fp8": lambda: quark_layer("per_channel"),
    "quark fp8 tensor": lambda: quark_layer("per_tensor"),
    "mlx": mlx_layer,
    "mlx 5 bits": lambda: mlx_layer(5),
    "mlx mxfp4": lambda: mlx_float_layer("mxfp4"),
    "mlx mxfp8": lambda: mlx_float_layer("mxfp8"),
    "mlx nvfp4": lambda: mlx_float_layer("nvfp4"),
    "modelopt fp8": modelopt_fp8_layer,
    "modelopt mxfp8": lambda: mxfp8_layer(modelopt=True),
    "modelopt nvfp4": lambda: nvfp4_layer(modelopt=True),
}
ONE_SCALE = ("fp8 tensor", "float-quantized", "modelopt fp8", "quark fp8 tensor")
ONE_SCALE_PER_ROW = ("fbgemm_fp8", "quark fp8")
# Tensors without which a layer is still whole.
OPTIONAL = ("g_idx", "weight_g_idx", "weight_format", "input_scale_ub")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("config", [None, *(make().config for make in LAYERS.values())])
def test_layers_that_are_not_quantised(config: dict[str, Any] | None) -> None:
    weight = torch.randn(3, 5).bfloat16()
    if config is not None and config["quant_method"] == "compressed-tensors":
        config["ignore"] = [NAME]
    unpacked = read_linear({f"{NAME}.weight": weight}, NAME, config)
    assert isinstance(unpacked, Dense)
    assert torch.equal(unpacked.values, weight)


def change(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split("/")
    for parent in parents:
        config = config[parent]
    config[key] = value


UNSUPPORTED = [
    ("gptq", "bits", 5, "bits 5 is not implemented; supported: 2, 3, 4, 8"),
    ("gptq", "checkpoint_format", "marlin", "checkpoint_format 'marlin' is not implemented; supported: gptq, gptq_v2"),
    ("gptq", "dynamic", {"-:.*q_proj": {}, "+:.*k_proj": {"bits": 8}}, "'dynamic' is not implemented"),
    ("gptq", "is_marlin_format", True, "'is_marlin_format' is not implemented"),
    ("gptq", "adapter", {"name": "lora"}, "'adapter' is not implemented"),
    ("gptq", "pack_dtype", "int16", "pack_dtype 'int16' is not implemented"),
    (
        "gptq",
        "quant_method",
        "hqq",
        "quant_method 'hqq' is not implemented; supported: gptq, awq, auto-round",
    ),
    ("awq", "bits", 8, "bits 8 is not implemented"),
    ("awq", "dynamic", {"+:.*k_proj": {"bits": 8}}, "'dynamic' is not implemented"),
    ("awq", "version", "gemv", "version 'gemv' is not implemented; supported: gemm"),
    ("awq", "zero_point", False, "zero_point False is not implemented"),
    ("nf4", "load_in_8bit", True, "expected load_in_4bit or load_in_8bit"),
    ("w4a16", "format", "marlin-24", "format 'marlin-24' is not implemented; supported: pack-quantized"),
    ("w4a16", "sparsity_config", {"format": "sparse-24-bitmask"}, "'sparsity_config' is not implemented"),
    ("w4a16", "transform_config", {"config_groups": {"R1": {}}}, "'config_groups' is not implemented"),
    ("w4a16", "config_groups/group_0/weights/dynamic", True, "'dynamic' is not implemented"),
    ("w4a16", "config_groups/group_0/weights/num_bits", 3, "num_bits 3 is not implemented"),
    ("w4a16", "config_groups/group_0/weights/type", "float", "type 'float' is not implemented"),
    ("w4a16", "config_groups/group_0/weights/strategy", "block", "strategy 'block' is not implemented"),
    ("w4a16", "config_groups/group_0/output_activations", {"num_bits": 8}, "'output_activations' is not implemented"),
    ("w4a16", "config_groups/group_0/input_activations", {"dynamic": True}, "need int-quantized weights of 8 bits"),
    ("w8a8", "format", "float-quantized", "type 'int' is not implemented; supported: float"),
    ("w8a8", "format", "mxfp6-quantized", "format 'mxfp6-quantized' is not implemented"),
    ("w8a8", "config_groups/group_0/weights/symmetric", False, "asymmetric weights are not implemented"),
    (
        "w8a8",
        "config_groups/group_0/weights",
        {"num_bits": 8, "strategy": "group", "group_size": 64},
        "need int-quantized weights of 8 bits with one scale per output",
    ),
    ("w8a8", "config_groups/group_0/input_activations/dynamic", False, "only dynamic scales by token"),
    ("w8a8", "config_groups/group_0/input_activations/strategy", "tensor", "only dynamic scales by token"),
    ("w8a8", "config_groups/group_0/input_activations/symmetric", False, "asymmetric activations are not implemented"),
    ("w8a8", "config_groups/group_0/input_activations/type", "float", "only int8 is implemented"),
    ("float-quantized", "config_groups/group_0/weights/num_bits", 4, "num_bits 4 is not implemented; supported: 8"),
    ("float-quantized", "config_groups/group_0/weights/strategy", "group", "strategy 'group' is not implemented"),
    ("float-quantized", "config_groups/group_0/weights/symmetric", False, "asymmetric weights are not implemented"),
    ("nvfp4", "config_groups/group_0/weights/group_size", 32, "group_size 32 is not implemented; supported: 16"),
    ("mxfp8", "config_groups/group_0/weights/group_size", 64, "group_size 64 is not implemented; supported: 32"),
    ("quark", "global_quant_config/weight/dtype", "int8", "dtype 'int8' is not implemented; supported: fp8_e4m3, fp4"),
    ("quark", "global_quant_config/weight/group_size", 16, "group_size 16 is not implemented; supported: 32"),
    ("quark", "global_quant_config/weight/qscheme", "per_tensor", "qscheme 'per_tensor' is not implemented"),
    ("quark", "global_quant_config/weight/scale_format", "float", "scale_format 'float' is not implemented"),
    ("quark", "layer_quant_config/*.router/weight", {"dtype": "uint4"}, "dtype 'uint4' is not implemented"),
    ("quark", "layer_type_quant_config/Linear", {"weight": {"dtype": "int4"}}, "dtype 'int4' is not implemented"),
    ("quark", "algo_config", [{"name": "rotation"}], "rotations are not implemented"),
    ("quark", "export/weight_format", "fake_quantized", "weight_format 'fake_quantized' is not implemented"),
    ("quark fp8", "global_quant_config/weight/qscheme", "per_group", "qscheme 'per_group' is not implemented"),
    ("fp8", "fmt", "e5m2", "fmt 'e5m2' is not implemented; supported: e4m3, float8_e4m3fn"),
    ("fp8", "expert_dtype", "fp4", "expert_dtype 'fp4' is not implemented; supported: fp8"),
    ("fp8", "scale_fmt", "ue4m3", "scale_fmt 'ue4m3' is not implemented; supported: float, ue8m0"),
    (
        "modelopt fp8",
        "quant_algo",
        "W4A8_AWQ",
        "quant_algo 'w4a8_awq' is not implemented; supported: fp8, mxfp8, nvfp4, w4a16_nvfp4, mixed_precision",
    ),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), UNSUPPORTED)
def test_unsupported_settings(name: str, path: str, value: Any, message: str) -> None:
    config = LAYERS[name]().config
    change(config, path, value)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        parse_quantization_config(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fp8", "fmt", "float8_e4m3fn"),
        ("gptq", "dynamic", {"-:.*attn.*": {}}),
        ("awq", "dynamic", {"-:.*attn.*": {}}),
        ("modelopt fp8", "quant_method", None),
        ("modelopt nvfp4", "quant_method", None),
        ("modelopt nvfp4", "quant_algo", "W4A16_NVFP4"),
    ],
)
def test_settings_that_change_nothing(name: str, key: str, value: Any) -> None:
    layer = LAYERS[name]()
    usual = read_linear(dict(layer.tensors), NAME, layer.config).dequantize()
    config = {**layer.config, key: value} if value else {k: own for k, own in layer.config.items() if k != key}
    assert config != layer.config
    assert torch.equal(read_linear(layer.tensors, NAME, config).dequantize(), usual)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gptq", "quant_method", None),
        ("gptq", "bits", "4"),
        ("gptq", "bits", None),
        ("gptq", "group_size", 64.0),
        ("gptq", "desc_act", 1),
        ("awq", "group_size", None),
        ("nf4", "load_in_4bit", "yes"),
        ("w8a8", "config_groups", []),
        ("w8a8", "config_groups/group_0", 3),
        ("w8a8", "config_groups/group_0/weights", None),
        ("w8a8", "config_groups/group_0/targets", "Linear"),
        ("w8a8", "ignore", {}),
        ("float-quantized block", "config_groups/group_0/weights/block_structure", [128]),
        ("fp8", "weight_block_size", [128, 0]),
        ("fp8", "weight_block_size", 128),
        ("modelopt fp8", "quant_algo", 8),
        ("quark", "global_quant_config", None),
        ("quark", "global_quant_config/weight", [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]),
        ("quark", "algo_config", {"name": "awq"}),
    ],
)
def test_settings_of_the_wrong_type(name: str, path: str, value: Any) -> None:
    config = LAYERS[name]().config
    change(config, path, value)
    with pytest.raises(CheckpointFormatError, match=rf"quantization_config: '{path.split('/')[-1]}'"):
        parse_quantization_config(config)


@pytest.mark.parametrize("pattern", ["(.+)+#", "((?:.?)*)#", "(.+){3,}#", "(.*)?*", ".*" * 5 + "#", "(a{2})??{9}"])
def test_patterns_that_could_match_forever(pattern: str) -> None:
    """Without the refusal the first one tries 2^34 ways to split the layer's name."""
    layer = int_quantized_layer()
    layer.config["ignore"] = [f"re:{pattern}"]
    with pytest.raises(UnsupportedModelError, match="at most 4 repetitions and none of a group"):
        read_linear(layer.tensors, NAME, layer.config)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (".*lm_head", False),
        ("^(?!.*(mlp|attn)).*$", False),
        (r"model\.layers\.(\d+)\.(mlp)?.*_proj$", True),
        (".*(gate|down)_proj", True),
    ],
)
def test_patterns_of_usual_checkpoints(pattern: str, matches: bool) -> None:
    config = int_quantized_layer().config | {"ignore": [f"re:{pattern}"]}
    assert (CompressedTensorsFormat.parse(config).scheme(NAME) is None) == matches


def test_damaged_pattern() -> None:
    layer = int_quantized_layer()
    layer.config["ignore"] = ["re:(*"]
    with pytest.raises(CheckpointFormatError, match="not a regular expression"):
        read_linear(layer.tensors, NAME, layer.config)


def test_error_says_what_was_expected_and_what_came() -> None:
    layer = gptq_layer()
    layer.tensors[f"{NAME}.scales"] = torch.ones(3, 64)
    with pytest.raises(CheckpointFormatError, match=rf"'{NAME}.scales': expected the shape \[4, 64\], got \[3, 64\]"):
        read_linear(layer.tensors, NAME, layer.config)
    layer.tensors[f"{NAME}.scales"] = torch.ones(4, 64, dtype=torch.float64)
    with pytest.raises(CheckpointFormatError, match="expected float32 or float16 or bfloat16, got float64"):
        read_linear(layer.tensors, NAME, layer.config)
    with pytest.raises(CheckpointFormatError, match=r"tensor 'lm_head\.weight' is missing"):
        LinearTensors({}, "lm_head").dense()


@pytest.mark.parametrize("name", LAYERS)
def test_damaged_tensors_give_one_clear_error(name: str) -> None:
    """Each tensor in turn is missing, cut, empty, of another dtype, or has other dimensions."""
    whole = LAYERS[name]()
    damages: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
        "missing": lambda t: None,
        "cut": lambda t: t[:-1] if t.dim() else torch.zeros(2),
        "narrow": lambda t: t[..., :-1] if t.dim() else torch.zeros(2),
        "empty": lambda t: t[:0] if t.dim() else t.new_zeros(0),
        "dtype": lambda t: t.to(torch.float64),
        "flat": lambda t: t.reshape(1, -1, 1),
        "scalar": lambda t: t.flatten()[0],
    }
    for key, tensor in whole.tensors.items():
        for damage, act in damages.items():
            tensors = dict(whole.tensors)
            damaged = act(tensor)
            is_bytes = name in ("nf4", "fp4") and key.endswith("weight")
            if key.endswith(OPTIONAL) or (damage == "flat" and is_bytes):
                continue  # of bitsandbytes' weight the bytes count, not the shape
            if name in ONE_SCALE and key.endswith("weight") and damage in ("cut", "narrow"):
                continue  # its scales go with any number of rows or inputs
            if name in ONE_SCALE_PER_ROW and (key[len(NAME) + 1 :], damage) in (
                ("weight", "narrow"),
                ("weight_scale", "scalar"),
            ):
                continue  # a row may have any number of inputs, and all rows may have one scale
            if tensor.numel() == 1 and damage in ("flat", "scalar"):
                continue  # one number may have any number of dimensions
            if damaged is None:
                del tensors[key]
            else:
                tensors[key] = damaged
            with pytest.raises(FastinferError) as error:
                read_linear(tensors, NAME, whole.config)
            assert "\n" not in str(error.value), (key, damage)


@pytest.mark.parametrize("name", LAYERS)
def test_random_numbers_are_an_error_or_a_weight(name: str) -> None:
    """Damaged numbers never end in another exception than the package's own."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        layer = LAYERS[name]()
        for key, tensor in layer.tensors.items():
            noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
            if torch.rand((), generator=generator) < 0.3:
                layer.tensors[key] = noise.view(tensor.dtype).view(tensor.shape)
        with contextlib.suppress(FastinferError):
            assert read_linear(layer.tensors, NAME, layer.config).shape == layer.weight.shape


def test_an_expert_that_a_stack_does_not_have() -> None:
    tensors = {f"{NAME}.scales": torch.ones(2, 4)}
    assert ExpertTensors(tensors, 1).get(f"{NAME}.scales") is not None
    assert ExpertTensors(tensors, 2).get(f"{NAME}.scales") is None


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_algo": "NVFP4"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}}},
    ],
)
def test_memory_of_nvfp4(config: dict[str, Any]) -> None:
    """Two numbers of a byte become two of int8, with an fp16 scale for 32 of them; or two of fp32."""
    assert PackedSizes(config, exact=False).num_bytes(f"{NAME}.weight", 64, "U8") == 128 * 8.5 / 8
    assert PackedSizes(config, exact=True).num_bytes(f"{NAME}.weight_packed", 64, "U8") == 128 * 4
    assert PackedSizes(config, exact=False).num_bytes(f"{NAME}.weight_scale", 64, "F8_E4M3") == 64


def test_memory_of_mlx() -> None:
    """Words of fp4 and fp8 become int8 with an fp16 scale for 32 inputs, or fp32; those of MXFP4 stay as they are."""
    for mode, numbers, fast in (("nvfp4", 8, 8.5), ("mxfp8", 4, 8.5), ("mxfp4", 8, 4)):
        config = {"mode": mode, "bits": 32 // numbers, "group_size": 32}
        assert PackedSizes(config, exact=False).num_bytes(f"{NAME}.weight", 64, "U32") == 16 * numbers * fast / 8
        exact = PackedSizes(config, exact=True).num_bytes(f"{NAME}.weight", 64, "U32")
        assert exact == (64 if mode == "mxfp4" else 16 * numbers * 4)
        embedding = PackedSizes(config, exact=False).num_bytes("embed.weight", 64, "U32", is_looked_up=True)
        assert embedding == (128 if mode == "mxfp4" else 16 * numbers * fast / 8)
