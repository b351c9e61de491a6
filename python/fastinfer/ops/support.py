"""Table of what the kernels support on each device; :func:`supported` queries it, :func:`markdown` prints it."""

from dataclasses import dataclass, fields, replace

import torch

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn
FLOATS, HALVES = (FP32, BF16, FP16), (BF16, FP16)
SAME = "the same"  # must be the dtype of the operator's first tensor

SHORT_NAMES: dict[torch.dtype | str, str] = {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP8: "fp8"}
MOST = 2**31  # end of a range without an upper limit
ANY, BLOCKS_OF_32, BLOCKS_OF_256 = range(1, MOST), range(32, MOST, 32), range(256, MOST, 256)
CUDA_HEAD_DIMS = (64, 80, 96, 128, 256, 512)
CUDA_LATENT_HEAD_DIMS = (320, 576)  # of keys whose first elements are the values

DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
EXCHANGES = ("all_gather", "all_gather_rows", "all_reduce", "all_reduce_add_rms_norm")
NOT_YET_RUN = {
    "not yet run on several GPUs": EXCHANGES,  # but between streams of one
    "not yet run on a GPU": ("select_pages", "select_tokens", "store_key_codes"),
}


@dataclass(frozen=True)
class Support:
    """Supported values of an operator on one device; ``None`` for a property that the operator does not have.

    Attributes:
        dtype: dtypes of the first tensor, nearly always the activations; none if the device does not have the operator.
        weight_dtype: dtypes of the weight, norm weight or adapter; for a quantised weight, of its packed integers.
        cache_dtype: dtypes of the KV cache; uint8 stands for int4.
        head_dim: head sizes; with a uint8 cache only the even ones.
        in_features: numbers of columns of a linear layer's weight.
        activation_bits: values of ``activation_bits``, see :func:`fastinfer.ops.int8_gemm`.
    """

    dtype: tuple[torch.dtype, ...] = FLOATS
    weight_dtype: tuple[torch.dtype | str, ...] | None = None
    cache_dtype: tuple[torch.dtype | str, ...] | None = None
    head_dim: range | tuple[int, ...] | None = None
    in_features: range | None = None
    activation_bits: tuple[int, ...] | None = None


QUANTIZED_CACHES = (INT8, FP8, UINT8)
ELEMENTWISE = Support()
NORM = Support(weight_dtype=(FP32, SAME))
STORE = Support(cache_dtype=(*FLOATS, *QUANTIZED_CACHES), head_dim=ANY)
ATTENTION = STORE
CUDA_ATTENTION = Support(HALVES, cache_dtype=(SAME, *QUANTIZED_CACHES), head_dim=CUDA_HEAD_DIMS)
DENSE = Support(weight_dtype=FLOATS, in_features=ANY)
CUDA_DENSE = Support(HALVES, weight_dtype=(SAME,), in_features=range(8, MOST, 8))
INT8_WEIGHT = Support(weight_dtype=(INT8,), in_features=BLOCKS_OF_32, activation_bits=(8, 16, 32))
INT6_WEIGHT = replace(INT8_WEIGHT, weight_dtype=(UINT8,), in_features=BLOCKS_OF_256)
INT4_WEIGHT = replace(INT8_WEIGHT, weight_dtype=(UINT8,))
W8A8 = Support((INT8,), weight_dtype=(INT8,), in_features=range(32, 131_041, 32))
PACK8 = Support((INT8,), in_features=BLOCKS_OF_32)
UNPACK6 = Support((UINT8,), in_features=BLOCKS_OF_256)
PACK4 = Support((UINT8,), in_features=BLOCKS_OF_32)

# Operators that support the same on CPU and CUDA.
ON_BOTH = {
    "rms_norm": NORM,
    "add_rms_norm": NORM,
    "rms_norm_quantize": NORM,
    "layer_norm": NORM,
    "quantize_int8": ELEMENTWISE,
    "silu_and_mul": ELEMENTWISE,
    "gelu_and_mul": ELEMENTWISE,
    "clamped_swiglu": ELEMENTWISE,
    "gelu": ELEMENTWISE,
    "relu2": ELEMENTWISE,
    "xielu": ELEMENTWISE,
    "sigmoid_gate": ELEMENTWISE,
    "softplus_gate": ELEMENTWISE,
    "softcap": ELEMENTWISE,
    "embedding": ELEMENTWISE,
    "permute_columns": ELEMENTWISE,
    "rotary_embedding": Support(head_dim=ANY),
    "norm_rotary_store": replace(STORE, weight_dtype=(FP32, SAME)),
    "latent_rotary_store": Support(weight_dtype=(FP32, SAME), cache_dtype=(*FLOATS, INT8, FP8)),
    "store_kv_cache": STORE,
    "causal_conv1d": NORM,
    "gated_delta_rule": NORM,
    "mamba2_scan": NORM,
    "merge_attention_states": Support(head_dim=ANY),
    "all_gather": ELEMENTWISE,
    "all_gather_rows": ELEMENTWISE,
    "all_reduce": ELEMENTWISE,
    "all_reduce_add_rms_norm": NORM,
    "local_ids": Support((torch.int64,)),
    "head_rows": Support((torch.int64,)),
    "route_experts": ELEMENTWISE,
    "combine_experts": ELEMENTWISE,
    "add_lora": Support(weight_dtype=FLOATS),
    "w8a8_gemm": W8A8,
    "int8_pack": PACK8,
    "int4_pack": PACK4,
    "int8_dequantize": PACK8,
    "int4_dequantize": PACK4,
    "sample": Support((FP32,)),
}

# Operators without a CUDA kernel.
ON_CPU = {
    "store_value_codes": replace(STORE, dtype=(torch.int32,), head_dim=range(8, MOST, 8)),
    "int5_gemm": INT4_WEIGHT,
    "grouped_int5_gemm": INT4_WEIGHT,
    "int5_pack": PACK4,
    "int5_dequantize": PACK4,
    "int6_gemm": INT6_WEIGHT,
    "grouped_int6_gemm": INT6_WEIGHT,
    "int6_pack": PACK8,
    "int6_dequantize": UNPACK6,
}


def _on_cuda(support: Support) -> Support:
    """Restrict a product with a quantised weight to what CUDA supports: 16-bit activations, not quantised."""
    return replace(support, dtype=HALVES, activation_bits=support.activation_bits and (32,))


TABLE: dict[str, dict[str, Support]] = {
    **{op: {"cpu": support, "cuda": support} for op, support in ON_BOTH.items()},
    **{op: {"cpu": support, "cuda": replace(support, dtype=())} for op, support in ON_CPU.items()},
    "paged_attention": {"cpu": ATTENTION, "cuda": CUDA_ATTENTION},
    "paged_attention_plan": {
        "cpu": Support((torch.int32,), head_dim=ANY),
        "cuda": Support((torch.int32,), head_dim=tuple(sorted(CUDA_HEAD_DIMS + CUDA_LATENT_HEAD_DIMS))),
    },
    "store_key_codes": {
        "cpu": replace(STORE, dtype=(torch.int32,), head_dim=range(8, MOST, 8)),
        "cuda": replace(STORE, dtype=(torch.int32,), head_dim=range(8, 513, 8)),
    },
    "select_pages": {
        "cpu": Support(head_dim=range(8, MOST, 8)),
        "cuda": Support(head_dim=range(8, 513, 8)),
    },
    "select_tokens": {
        "cpu": Support(cache_dtype=FLOATS, head_dim=ANY),
        "cuda": Support(HALVES, cache_dtype=(SAME,), head_dim=range(8, 129, 8)),
    },
    **{op: {"cpu": DENSE, "cuda": CUDA_DENSE} for op in ("gemm", "grouped_gemm")},
    **{op: {"cpu": INT8_WEIGHT, "cuda": _on_cuda(INT8_WEIGHT)} for op in ("int8_gemm", "grouped_int8_gemm")},
    **{
        op: {"cpu": INT4_WEIGHT, "cuda": _on_cuda(INT4_WEIGHT)}
        for op in ("int4_gemm", "grouped_int4_gemm", "lut_gemm", "grouped_lut_gemm")
    },
}


def supported(
    op: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    in_features: int | None = None,
    activation_bits: int | None = None,
) -> bool:
    """Tell whether an operator supports a combination of dtypes and sizes on a device; omitted values may be anything.

    The answer is the same on every machine, because it describes the kernels. ``fastinfer info`` tells whether this
    build has CUDA kernels and whether this machine has a GPU. For shapes, strides and alignment see each operator.

    Args:
        op: name of the operator, without ``fastinfer.ops.``.
        device: ``"cpu"``, ``"cuda"`` or a ``torch.device``, whose index is ignored.
        dtype: dtype of the operator's first tensor, nearly always the activations.
        weight_dtype: dtype of the weight, norm weight or adapter; for a quantised weight, of its packed integers.
        cache_dtype: dtype of the KV cache; uint8 stands for int4.
        head_dim: number of elements of a head.
        in_features: number of columns of a linear layer's weight.
        activation_bits: value of ``activation_bits``, see :func:`fastinfer.ops.int8_gemm`.

    Returns:
        False if the operator would raise.

    Raises:
        ValueError: the operator or device is unknown, or the operator does not have a property that is passed.

    Devices: describes CPU and CUDA, computes on neither.

    >>> import torch, fastinfer.ops as ops
    >>> ops.supported("paged_attention", device="cpu", dtype=torch.float32, head_dim=72)
    True
    >>> ops.supported("paged_attention", device="cuda", dtype=torch.bfloat16, head_dim=72)
    False
    >>> ops.supported("rms_norm", device="cuda", head_dim=64)
    Traceback (most recent call last):
    ValueError: rms_norm has no head_dim, only dtype, weight_dtype
    """
    support = _support(op, torch.device(device).type)
    requested = {
        "weight_dtype": weight_dtype,
        "cache_dtype": cache_dtype,
        "head_dim": head_dim,
        "in_features": in_features,
        "activation_bits": activation_bits,
    }
    requested = {name: value for name, value in requested.items() if value is not None}
    known = [field.name for field in fields(Support) if getattr(support, field.name) is not None]
    if unknown := [name for name in requested if name not in known]:
        raise ValueError(f"{op} has no {', '.join(unknown)}, only {', '.join(known)}")
    if cache_dtype == UINT8 and (head_dim or 0) % 2:
        return False
    return any(
        all(value in _values(support, name, first) for name, value in requested.items())
        for first in support.dtype
        if dtype in (None, first)
    )


def _support(op: str, device: str) -> Support:
    if op not in TABLE:
        raise ValueError(f"op must be one of {', '.join(sorted(TABLE))}, got {op!r}")
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    return TABLE[op][device]


def _values(support: Support, name: str, first: torch.dtype) -> range | tuple[object, ...]:
    values = getattr(support, name)
    return values if isinstance(values, range) else tuple(first if value == SAME else value for value in values)


def devices(op: str) -> str:
    """Return the devices of an operator, as in its docstring: ``"CPU, CUDA"``."""
    on = ", ".join(DEVICES[device] for device, support in TABLE[op].items() if support.dtype)
    return next((f"{on} ({remark})" for remark, names in NOT_YET_RUN.items() if op in names), on)


def cell(op: str, device: str) -> str:
    """Summarise what an operator supports on a device, for a cell of the README's table."""
    support = _support(op, device)
    if not support.dtype:
        return "no"
    parts = [_dtypes(support.dtype)]
    if quantized := tuple(dtype for dtype in support.cache_dtype or () if dtype in QUANTIZED_CACHES):
        parts.append(f"{_dtypes(quantized, 'int4')} caches")
    if isinstance(support.head_dim, tuple):
        parts.append(f"head sizes {_integers(support.head_dim)}")
    return "; ".join(parts)


def markdown() -> str:
    """Return the table of all operators in Markdown; devices that support the same share a row."""
    rows = [
        ["operator", "devices", "dtype", "weight", "KV cache", "head size", "inputs", "`activation_bits`"],
        ["---"] * 8,
    ]
    for op, by_device in sorted(TABLE.items()):
        for support in dict.fromkeys(support for support in by_device.values() if support.dtype):
            names = [DEVICES[device] for device, same in by_device.items() if same == support]
            columns = [
                _dtypes(support.dtype),
                _dtypes(support.weight_dtype),
                _dtypes(support.cache_dtype, "int4"),
                _integers(support.head_dim),
                _integers(support.in_features),
                _integers(support.activation_bits),
            ]
            rows.append([f"`{op}`", ", ".join(names), *columns])
    notes = [f"{', '.join(f'`{op}`' for op in names)}: {remark}." for remark, names in NOT_YET_RUN.items()]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", " ".join(notes)])


def _dtypes(dtypes: tuple[torch.dtype | str, ...] | None, uint8: str = "uint8") -> str:
    names = SHORT_NAMES | {UINT8: uint8}
    return ", ".join(names.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes or ())


def _integers(values: range | tuple[int, ...] | None) -> str:
    if not isinstance(values, range):
        return ", ".join(map(str, values or ()))
    step = "any" if values.step == 1 else f"multiples of {values.step}"
    return step if values.stop == MOST else f"{step} up to {values[-1]:,}"
