"""Linear layers as quantisation tools pack them: plain loops over the documented layouts, and the weights they mean."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "model.layers.0.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Layer:
    """Tensors by full name, the configuration, and the weight [out, in] in fp64."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    weight: Tensor


def int32(word: int) -> int:
    """The signed number with these 32 bits."""
    return word - 2**32 if word >= 2**31 else word


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """[rows, n] as [rows, ceil(n * bits / 32)] int32: one long number per row, lowest bits first."""
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * index) for index, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([int32(number >> (32 * index) & 0xFFFFFFFF) for index in range(count)])
    return torch.tensor(rows, dtype=torch.int32)


def random_layer(
    bits: int, rows: int, columns: int, group_size: int, act_order: bool = False, low_zero: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers [out, in], scales fp16 [out, groups], zeros [out, groups], the group of every input [in]."""
    groups = columns // group_size
    q = torch.randint(0, 2**bits, (rows, columns))
    scales = (torch.rand(rows, groups) * 0.01 + 1e-3).half()
    zeros = torch.randint(low_zero, 2**bits, (rows, groups))
    group = torch.arange(columns) // group_size
    return q, scales, zeros, group[torch.randperm(columns)] if act_order else group


def dequantize(q: Tensor, scales: Tensor, zeros: Tensor | int, group: Tensor) -> Tensor:
    zeros = zeros[:, group] if isinstance(zeros, Tensor) else zeros
    return scales.double()[:, group] * (q - zeros)


def gptq_layer(
    bits: int = 4,
    rows: int = 64,
    columns: int = 256,
    group_size: int = 64,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    version: int = 1,
) -> Layer:
    size = columns if group_size == -1 else group_size
    q, scales, zeros, group = random_layer(bits, rows, columns, size, act_order)
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    tensors = {
        "qweight": pack_rows(q, bits).t().contiguous(),
        "qzeros": pack_rows(stored.t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": group.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    return Layer(_named(tensors), config, dequantize(q, scales, zeros, group))


def awq_layer(rows: int = 64, columns: int = 256, group_size: int = 64) -> Layer:
    q, scales, zeros, group = random_layer(4, rows, columns, columns if group_size == -1 else group_size)

    def pack(values: Tensor) -> Tensor:
        """[n, out]: every eight outputs in the order of AWQ's kernel."""
        return pack_rows(values.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), 4)

    tensors = {"qweight": pack(q.t()), "qzeros": pack(zeros.t()), "scales": scales.t().contiguous()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Layer(_named(tensors), config, dequantize(q, scales, zeros, group))


def mlx_layer(bits: int = 4, rows: int = 40, columns: int = 256, group_size: int = 64) -> Layer:
    q, scales, _, group = random_layer(bits, rows, columns, group_size)
    mins = torch.randn(scales.shape).half()
    tensors = {"weight": pack_rows(q, bits).view(torch.uint32), "scales": scales, "biases": mins}
    config = {"quant_method": "mlx", "bits": bits, "group_size": group_size}
    return Layer(_named(tensors), config, dequantize(q, scales, 0, group) + mins.double()[:, group])


def mxfp4_layer(rows: int = 5, columns: int = 96) -> Layer:
    layer = nvfp4_layer(rows, columns)
    exponents = torch.randint(110, 130, (rows, columns // 32))
    packed = layer.tensors[f"{NAME}.weight_packed"].long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    numbers = table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)]
    tensors = {"weight_packed": packed.byte(), "weight_scale": exponents.byte()}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weight = numbers * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)
    return Layer(_named(tensors), compressed_config("mxfp4-pack-quantized", weights), weight)


def mxfp8_layer(rows: int = 5, columns: int = 96, *, modelopt: bool = False) -> Layer:
    """Numbers in e4m3, all of them, with powers of two."""
    weight = fp8_layer(rows, columns, None).tensors[f"{NAME}.weight"]
    exponents = torch.randint(110, 130, (rows, columns // 32))
    meant = weight.double() * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    config = compressed_config("mxfp8-quantized", weights)
    if modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    return Layer(_named({"weight": weight, "weight_scale": exponents.byte()}), config, meant)


def mlx_float_layer(mode: str, rows: int = 5, columns: int = 96) -> Layer:
    """MLX's modes of fp4 and fp8: the numbers of a row are in words, and all scales are bytes."""
    layer = {"mxfp4": mxfp4_layer, "mxfp8": mxfp8_layer, "nvfp4": nvfp4_layer}[mode](rows, columns)
    numbers, scales, *factors = layer.tensors.values()  # MLX's NVFP4 has no factor
    tensors = {"weight": numbers.view(torch.uint32), "scales": scales.view(torch.uint8)}
    bits, group_size = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    config = {"quant_method": "mlx", "mode": mode, "bits": bits, "group_size": group_size}
    return Layer(_named(tensors), config, layer.weight * (factors[0].double() if factors else 1))


def fbgemm_layer() -> Layer:
    layer = fp8_layer(block=(1, 64))
    tensors = {f"{NAME}.weight": layer.tensors[f"{NAME}.weight"]}
    tensors[f"{NAME}.weight_scale"] = layer.tensors[f"{NAME}.weight_scale_inv"]
    tensors[f"{NAME}.input_scale_ub"] = torch.tensor(1200.0)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return Layer(tensors, config, layer.weight)


def quark_layer(kind: str) -> Layer:
    """Weights in MXFP4, or in fp8 with a scale for each output or for all."""
    settings: dict[str, Any] = {"dtype": "fp8_e4m3", "qscheme": kind, "is_dynamic": False, "symmetric": True}
    if kind == "mxfp4":
        layer = mxfp4_layer()
        settings |= {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    else:
        layer = fp8_layer(block=(1, 64) if kind == "per_channel" else None)
    weight, scales = layer.tensors.values()
    tensors = {"weight": weight, "weight_scale": scales.flatten() if kind == "per_channel" else scales}
    config = {
        "quant_method": "quark",
        "algo_config": [{"name": "autosmoothquant"}],
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {"weight": settings, "input_tensors": {**settings, "is_dynamic": True}},
        "layer_quant_config": {"*.router": {"weight": None}},
        "layer_type_quant_config": {},
    }
    return Layer(_named(tensors), config, layer.weight)


def bitsandbytes_layer(
    kind: str = "nf4", rows: int = 40, columns: int = 256, block_size: int = 64, *, nested: bool = True
) -> Layer:
    places = torch.randint(0, 16, (rows * columns,)).tolist()
    table = torch.randn(16).sort().values
    blocks = rows * columns // block_size
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block_size, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors = {"weight.quant_map": table}
    if nested:
        codes, nested_table = torch.randint(0, 256, (blocks,)), torch.randn(256)
        nested_scales = torch.rand(-(-blocks // 100)) + 0.5
        state |= {"nested_blocksize": 100, "nested_dtype": "float32", "nested_offset": 0.25}
        tensors |= {"weight.nested_absmax": nested_scales, "weight.nested_quant_map": nested_table}
        tensors["weight.absmax"] = codes.to(torch.uint8)
        scales = [nested_table[code].item() * nested_scales[i // 100].item() + 0.25 for i, code in enumerate(codes)]
    else:
        tensors["weight.absmax"] = torch.rand(blocks) + 0.5
        scales = tensors["weight.absmax"].tolist()
    packed = [first << 4 | second for first, second in zip(places[0::2], places[1::2], strict=True)]
    tensors["weight"] = torch.tensor(packed, dtype=torch.uint8)[:, None]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    weight = [table[place].item() * scales[index // block_size] for index, place in enumerate(places)]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Layer(_named(tensors), config, torch.tensor(weight, dtype=torch.float64).view(rows, columns))


def int8_layer(rows: int = 40, columns: int = 96) -> Layer:
    q, scales = torch.randint(-127, 128, (rows, columns)), torch.rand(rows) + 0.1
    tensors = {"weight": q.to(torch.int8), "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return Layer(_named(tensors), config, q * scales.double()[:, None] / 127)


def compressed_config(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def pack_quantized_layer(
    bits: int = 4,
    rows: int = 40,
    columns: int = 256,
    group_size: int = 64,
    *,
    symmetric: bool = True,
    act_order: bool = False,
) -> Layer:
    """W4A16 or W8A16; 40 rows of 4-bit zeros fill five words, of three bits more would not be whole."""
    q, scales, zeros, group = random_layer(bits, rows, columns, columns if group_size == -1 else group_size, act_order)
    tensors = {
        "weight_packed": pack_rows(q, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    else:
        tensors["weight_zero_point"] = pack_rows(zeros.t(), bits).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = group.int()
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights["actorder"] = "group" if act_order else None
    weight = dequantize(q, scales, zeros, group)
    return Layer(_named(tensors), compressed_config("pack-quantized", weights), weight)


def int_quantized_layer(rows: int = 40, columns: int = 96, *, strategy: str = "channel") -> Layer:
    """W8A8."""
    q = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    scales = torch.rand(rows, 1) + 0.1 if strategy == "channel" else torch.tensor([0.3])
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    tensors = {"weight": q, "weight_scale": scales}
    return Layer(_named(tensors), compressed_config("int-quantized", weights, inputs), q * scales.double())


def fp8_layer(
    rows: int = 33, columns: int = 64, block: tuple[int, int] | None = (16, 21), *, scale_shape: tuple[int, ...] = ()
) -> Layer:
    """Numbers in e4m3, all of them, with a scale for each block, of which the last ones are cut; or with one scale."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = numbers[numbers.float().isfinite()]
    weight = finite[torch.randint(0, len(finite), (rows, columns))]
    if block is None:
        scales = (torch.rand(scale_shape) + 0.5) / 256
        spread = scales.double().view(-1)
    else:
        scales = (torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5) / 256
        spread = torch.empty(rows, columns, dtype=torch.float64)
        for row in range(rows):
            for column in range(columns):
                spread[row, column] = scales[row // block[0], column // block[1]]
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    return Layer(_named({"weight": weight, "weight_scale_inv": scales}), config, weight.double() * spread)


def float_quantized_layer(strategy: str = "channel") -> Layer:
    """fp8 of compressed-tensors."""
    block = {"channel": (1, 64), "block": (16, 21), "tensor": None}[strategy]
    layer = fp8_layer(block=block, scale_shape=(1,))
    layer.tensors[f"{NAME}.weight_scale"] = layer.tensors.pop(f"{NAME}.weight_scale_inv")
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [16, 21]
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return Layer(layer.tensors, compressed_config("float-quantized", weights, inputs), layer.weight)


def nvfp4_layer(rows: int = 5, columns: int = 96, *, modelopt: bool = False) -> Layer:
    """Numbers in e2m1, each from a table, with scales of very different sizes."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    places = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // 16) * 2.0 ** torch.randint(-4, 5, (rows, columns // 16))).to(
        torch.float8_e4m3fn
    )
    factor = torch.tensor([0.0117])
    packed = torch.tensor(
        [[row[i] | row[i + 1] << 4 for i in range(0, columns, 2)] for row in places.tolist()], dtype=torch.uint8
    )
    numbers = torch.tensor(table, dtype=torch.float64)[places]
    weight = numbers * scales.double().repeat_interleave(16, 1) * factor.double()
    if modelopt:
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor[0]}
        return Layer(_named(tensors), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, weight)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": 1 / factor}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return Layer(_named(tensors), compressed_config("nvfp4-pack-quantized", weights), weight)


def modelopt_fp8_layer() -> Layer:
    layer = fp8_layer(block=None)
    layer.tensors[f"{NAME}.weight_scale"] = layer.tensors.pop(f"{NAME}.weight_scale_inv")
    return Layer(layer.tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, layer.weight)


def _named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{NAME}.{part}": tensor for part, tensor in tensors.items()}
