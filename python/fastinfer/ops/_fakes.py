"""Shape functions ("fakes") of the operators, which torch.compile and torch.export trace.

They also register that no operator has a gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel, register_fake

from fastinfer.ops._library import ops

_library = torch.library.Library("fastinfer", "IMPL")


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated shape function of an operator and its overloads, and from it those that return nothing.

    Shape functions use ``new_empty``, not ``empty_like``: results are contiguous whatever the arguments' strides. The
    autograd key falls through: otherwise a result of a Parameter would claim to require grad and fail in ``backward``.
    """

    def register(shape: Callable[..., Any]) -> Callable[..., Any]:
        checked = _on_one_device(name, shape)
        for overload in getattr(ops, name).overloads():
            full_name = name if overload == "default" else f"{name}.{overload}"
            written = {"out": _out_fake(name, checked), "inplace": _inplace_fake(checked)}
            register_fake(f"fastinfer::{full_name}", written.get(overload, checked))
            _library.impl(full_name, fallthrough_kernel, "Autograd")
        return shape

    return register


def _on_one_device(name: str, shape: Callable[..., Any]) -> Callable[..., Any]:
    """Make a shape function check that all tensors are on one device, but a ``group``, which may be in host memory.

    torch calls a shape function also for real tensors if one of them is on ``meta``. Without the check, the result for
    a weight that was never loaded would be memory that nobody wrote.
    """
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]

    def check(*args: Any, **kwargs: Any) -> Any:
        device = None
        for key, value in (*zip(names, args, strict=False), *kwargs.items()):
            if not isinstance(value, Tensor) or (key == "group" and value.device.type == "cpu"):
                continue
            device = device or value.device
            if value.device != device:
                expected = f"be on the device of the other arguments, {device}"
                raise RuntimeError(f"{name}: {key} must {expected}, got {value.device}")
        return shape(*args, **kwargs)

    return check


def _inplace_fake(shape: Callable[..., Any]) -> Callable[..., None]:
    """Make the fake of an ``.inplace`` overload, which writes into its arguments."""

    def check(*args: Any) -> None:
        shape(*args)

    return check


def _out_fake(name: str, shape: Callable[..., Tensor]) -> Callable[..., None]:
    """Make the fake of an ``.out`` overload, which checks ``out`` against the result of the shape function."""

    def check(*args: Any, out: Tensor, **kwargs: Any) -> None:
        like = shape(*args, **kwargs)
        fits = out.dim() == like.dim() and all(a == b for a, b in zip(out.shape, like.shape, strict=True))
        for right, expected in [
            (fits, f"have the shape {list(like.shape)}, got {list(out.shape)}"),
            (out.device == like.device, f"be on the device of the other arguments, {like.device}, got {out.device}"),
            (out.dtype == like.dtype, f"be {like.dtype}, got {out.dtype}"),
            (out.is_contiguous(), f"be contiguous, got strides {list(out.stride())}"),
        ]:
            if not right:
                raise RuntimeError(f"{name}: out must {expected}")

    return check


@fake("rms_norm")
def _(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
    return x.new_empty(x.shape)


@fake("add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@fake("rms_norm_quantize")
def _(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake("layer_norm")
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@fake("quantize_int8")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake("embedding")
def _(weight: Tensor, ids: Tensor, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    like = weight if residual is None else residual
    return like.new_empty([ids.shape[0], weight.shape[1]], dtype=dtype)


@fake("silu_and_mul")
def _(x: Tensor, limit: float | None = None) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@fake("clamped_swiglu")
def _(x: Tensor) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@fake("gelu_and_mul")
def _(x: Tensor, approximate: str) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@fake("relu2")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake("xielu")
def _(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@fake("gelu")
def _(x: Tensor, approximate: str, factor: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


@fake("softcap")
def _(x: Tensor, cap: float) -> None:
    return None


@fake("rotary_embedding")
def _(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> None:
    return None


@fake("store_kv_cache")
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *scales: Tensor | None) -> None:
    return None


@fake("norm_rotary_store")
def _(q: Tensor, *args: object) -> None:
    return None


@fake("latent_rotary_store")
def _(q_latent: Tensor, q_rope: Tensor, *args: object) -> Tensor:
    return q_latent.new_empty([*q_latent.shape[:2], q_latent.shape[2] + q_rope.shape[2]])


@fake("paged_attention")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: object) -> Tensor:
    in_keys = v_cache.shape[3] < k_cache.shape[3]
    return q.new_empty([*q.shape[:2], v_cache.shape[3]] if in_keys else q.shape)


@fake("paged_attention_plan")
def _(seq_lens: Tensor, *args: object) -> Tensor:
    # The length depends on the GPU; the CPU needs no plan, and nothing reads one on meta.
    on_gpu = seq_lens.device.type == "cuda"
    return seq_lens.new_empty([torch.library.get_ctx().new_dynamic_size() if on_gpu else 0])


@fake("store_key_codes")
@fake("store_value_codes")
def _(codes: Tensor, *args: object) -> None:
    return None


@fake("select_pages")
def _(
    q: Tensor,
    codes: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    block_size: int,
    share: float,
    num_dense_pages: int,
    scale: float,
    row_start: Tensor | None = None,
    *rest: Tensor,  # of the overload ``.rest``, which has codes of values instead of ``row_start``
) -> tuple[Tensor, Tensor]:
    tokens = q.shape[0]  # len(q) would fix the number in a graph
    rows = tokens if row_start is None or rest else row_start.shape[0] - 1
    sizes = [rows, codes.shape[1]]
    return block_table.new_empty([*sizes, block_table.shape[1]]), block_table.new_empty(sizes)


@fake("select_tokens")
def _(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    width = min(top_k, block_table.shape[1] * keys.shape[1])
    tokens = q.shape[0]  # len(q) would fix the number in a graph
    return block_table.new_empty([tokens, width]), block_table.new_empty([tokens])


@fake("merge_attention_states")
def _(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a_lse.new_empty(a_lse.shape)


def _gemm_out(x: Tensor, out_features: int, activation: str | None) -> Tensor:
    return x.new_empty([x.shape[0], out_features // 2 if activation else out_features])


@fake("gemm")
def _(x: Tensor, weight: Tensor, bias, norm_weight, eps, activation, residual) -> Tensor:  # type: ignore[no-untyped-def]
    return _gemm_out(x, weight.shape[0], activation)


@fake("int8_gemm")
@fake("int5_gemm")
@fake("int4_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, mins, out_features, bias, norm_weight, eps, activation, residual, activation_bits
) -> Tensor:
    return _gemm_out(x, out_features, activation)


@fake("int6_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, out_features, bias, norm_weight, eps, activation, residual, activation_bits
) -> Tensor:
    return _gemm_out(x, out_features, activation)


@fake("lut_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, table, out_features, bias, norm_weight, eps, activation, residual, activation_bits
) -> Tensor:
    return _gemm_out(x, out_features, activation)


@fake("route_experts")
def _(logits: Tensor, top_k: int, renormalize: bool, **options: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    weights = logits.new_empty([tokens, top_k], dtype=torch.float32)
    ids, row_ids, start = (
        logits.new_empty(shape, dtype=torch.int32) for shape in ([tokens, top_k], [tokens * top_k], [experts + 1])
    )
    return weights, ids, row_ids, start


@fake("head_rows")
def _(positions: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    rows = positions.new_empty([positions.shape[0] * heads], dtype=torch.int32)
    return rows, positions.new_empty([heads + 1], dtype=torch.int32)


def _grouped_out(x: Tensor, out_features: int, row_ids: Tensor, activation: str | None) -> Tensor:
    return x.new_empty([row_ids.shape[0], out_features // 2 if activation else out_features])


@fake("grouped_gemm")
def _(  # type: ignore[no-untyped-def]
    x: Tensor, weight: Tensor, row_ids: Tensor, expert_start, bias, activation: str | None
) -> Tensor:
    return _grouped_out(x, weight.shape[1], row_ids, activation)


@fake("grouped_int8_gemm")
@fake("grouped_int5_gemm")
@fake("grouped_int4_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, mins, out_features, row_ids, expert_start, bias, activation, activation_bits
) -> Tensor:
    return _grouped_out(x, out_features, row_ids, activation)


@fake("grouped_int6_gemm")
def _(x, qweight, scales, out_features, row_ids, expert_start, bias, activation, activation_bits) -> Tensor:  # type: ignore[no-untyped-def]
    return _grouped_out(x, out_features, row_ids, activation)


@fake("grouped_lut_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, table, out_features, row_ids, expert_start, bias, activation, activation_bits
) -> Tensor:
    return _grouped_out(x, out_features, row_ids, activation)


@fake("combine_experts")
def _(  # type: ignore[no-untyped-def]
    x: Tensor, expert_weights: Tensor, residual, expert_ids=None, start: int = 0, end: int = 0
) -> Tensor:
    return x.new_empty([expert_weights.shape[0], x.shape[1]])


@fake("w8a8_gemm")
def _(  # type: ignore[no-untyped-def]
    x: Tensor, x_scales, qweight, scales, out_features: int, bias, activation, residual, dtype: torch.dtype
) -> Tensor:
    return x.new_empty([x.shape[0], out_features // 2 if activation else out_features], dtype=dtype)


@fake("add_lora")
def _(y: Tensor, *args: object) -> None:
    return None


@fake("permute_columns")
def _(x: Tensor, permutation: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake("all_gather")
def _(x: Tensor, group: Tensor, rank: int, widths: list[int]) -> Tensor:
    return x.new_empty([x.shape[0], sum(widths)])


@fake("all_gather_rows")
def _(x: Tensor, ids: Tensor, group: Tensor, rank: int, start: int, end: int) -> Tensor:
    return x.new_empty(x.shape)


@fake("all_reduce")
def _(x: Tensor, group: Tensor, rank: int) -> Tensor:
    return x.new_empty(x.shape)


@fake("all_reduce_add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Tensor, rank: int) -> Tensor:
    return x.new_empty(x.shape)


@fake("local_ids")
def _(ids: Tensor, start: int, end: int) -> Tensor:
    return ids.new_empty(ids.shape)


@fake("int4_pack")
def _(q: Tensor) -> Tensor:
    return q.new_empty([-(-q.shape[0] // 16), q.shape[1] // 32, 4, 16, 4])


@fake("int5_pack")
def _(q: Tensor) -> Tensor:
    return q.new_empty([-(-q.shape[0] // 16), q.shape[1] // 32, 5, 16, 4])


@fake("int6_pack")
def _(q: Tensor) -> Tensor:
    return q.new_empty([-(-q.shape[0] // 16), q.shape[1] // 32, 6, 16, 4], dtype=torch.uint8)


@fake("int8_pack")
def _(q: Tensor) -> Tensor:
    return q.new_empty([-(-q.shape[0] // 16), q.shape[1] // 32, 8, 16, 4])


@fake("int4_dequantize")
@fake("int5_dequantize")
@fake("int8_dequantize")
def _(  # type: ignore[no-untyped-def]
    qweight: Tensor, scales, mins, out_features: int, rows: Tensor | None, dtype: torch.dtype
) -> Tensor:
    count = out_features if rows is None else rows.shape[0]
    return qweight.new_empty([count, qweight.shape[1] * 32], dtype=dtype)


@fake("int6_dequantize")
def _(qweight: Tensor, scales, out_features: int, rows: Tensor | None, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
    count = out_features if rows is None else rows.shape[0]
    return qweight.new_empty([count, qweight.shape[1] * 32], dtype=dtype)


@fake("sigmoid_gate")
@fake("softplus_gate")
def _(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake("causal_conv1d")
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


@fake("gated_delta_rule")
def _(qkv: Tensor, z: Tensor, *args: Any) -> Tensor:
    return qkv.new_empty(z.shape)


@fake("mamba2_scan")
def _(xbc: Tensor, z: Tensor, *args: Any) -> Tensor:
    return xbc.new_empty(z.shape)


@fake("sample")
def _(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, num_logprobs = logits.shape[0], args[-1]
    with_logprobs, count = 0 if num_logprobs is None else rows, num_logprobs or 0
    tokens, top_tokens = logits.new_empty([rows], dtype=torch.int64), logits.new_empty([rows, count], dtype=torch.int64)
    return tokens, logits.new_empty([with_logprobs]), logits.new_empty([rows, count]), top_tokens
