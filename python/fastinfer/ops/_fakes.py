"""Shape functions ("fakes") of the operators, which torch.compile and torch.export trace instead of the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from fastinfer.ops import _library  # noqa: F401  (the schemas must exist first)


@register_fake("fastinfer::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


@register_fake("fastinfer::add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@register_fake("fastinfer::rms_norm_quantize")
def _(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@register_fake("fastinfer::layer_norm")
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@register_fake("fastinfer::quantize_int8")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


@register_fake("fastinfer::embedding")
def _(weight: Tensor, ids: Tensor, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    like = weight if residual is None else residual
    return like.new_empty([ids.shape[0], weight.shape[1]], dtype=dtype)


@register_fake("fastinfer::silu_and_mul")
def _(x: Tensor) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@register_fake("fastinfer::gelu_and_mul")
def _(x: Tensor, approximate: str) -> Tensor:
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@register_fake("fastinfer::gelu")
def _(x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


@register_fake("fastinfer::softcap")
def _(x: Tensor, cap: float) -> None:
    return None


@register_fake("fastinfer::rotary_embedding")
def _(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> None:
    return None


@register_fake("fastinfer::store_kv_cache")
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *scales: Tensor | None) -> None:
    return None


@register_fake("fastinfer::norm_rotary_store")
def _(q: Tensor, *args: object) -> None:
    return None


@register_fake("fastinfer::paged_attention")
def _(q: Tensor, *args: object) -> Tensor:
    return q.new_empty(q.shape)


@register_fake("fastinfer::paged_attention_plan")
def _(seq_lens: Tensor, *args: object) -> Tensor:
    # Its length depends on the GPU; the CPU needs no plan.
    on_cpu = seq_lens.device.type == "cpu"
    return seq_lens.new_empty([0 if on_cpu else torch.library.get_ctx().new_dynamic_size()])


@register_fake("fastinfer::merge_attention_states")
def _(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(a_lse)


def _gemm_out(x: Tensor, out_features: int, activation: str | None) -> Tensor:
    return x.new_empty([x.shape[0], out_features // 2 if activation else out_features])


@register_fake("fastinfer::gemm")
def _(x: Tensor, weight: Tensor, bias, norm_weight, eps, activation, residual) -> Tensor:  # type: ignore[no-untyped-def]
    return _gemm_out(x, weight.shape[0], activation)


@register_fake("fastinfer::int8_gemm")
@register_fake("fastinfer::int4_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, mins, out_features, bias, norm_weight, eps, activation, residual, activation_bits
) -> Tensor:
    return _gemm_out(x, out_features, activation)


@register_fake("fastinfer::table_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, table, out_features, bias, norm_weight, eps, activation, residual
) -> Tensor:
    return _gemm_out(x, out_features, activation)


@register_fake("fastinfer::route_experts")
def _(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    weights = logits.new_empty([tokens, top_k], dtype=torch.float32)
    ids, row_ids, start = (
        logits.new_empty(shape, dtype=torch.int32) for shape in ([tokens, top_k], [tokens * top_k], [experts + 1])
    )
    return weights, ids, row_ids, start


def _grouped_out(x: Tensor, out_features: int, row_ids: Tensor, activation: str | None) -> Tensor:
    return x.new_empty([row_ids.shape[0], out_features // 2 if activation else out_features])


@register_fake("fastinfer::grouped_gemm")
def _(x: Tensor, weight: Tensor, row_ids: Tensor, expert_start: Tensor, activation: str | None) -> Tensor:
    return _grouped_out(x, weight.shape[1], row_ids, activation)


@register_fake("fastinfer::grouped_int8_gemm")
@register_fake("fastinfer::grouped_int4_gemm")
def _(  # type: ignore[no-untyped-def]
    x, qweight, scales, mins, out_features, row_ids, expert_start, activation, activation_bits
) -> Tensor:
    return _grouped_out(x, out_features, row_ids, activation)


@register_fake("fastinfer::grouped_table_gemm")
def _(x, qweight, scales, table, out_features, row_ids, expert_start, activation) -> Tensor:  # type: ignore[no-untyped-def]
    return _grouped_out(x, out_features, row_ids, activation)


@register_fake("fastinfer::combine_experts")
def _(x: Tensor, expert_weights: Tensor, residual: Tensor | None) -> Tensor:
    return x.new_empty([expert_weights.shape[0], x.shape[1]])


@register_fake("fastinfer::w8a8_gemm")
def _(x, x_scales, qweight, scales, out_features, bias, activation, residual, dtype) -> Tensor:  # type: ignore[no-untyped-def]
    return x.new_empty([x.shape[0], out_features // 2 if activation else out_features], dtype=dtype)


@register_fake("fastinfer::add_lora")
def _(y: Tensor, *args: object) -> None:
    return None


@register_fake("fastinfer::permute_columns")
def _(x: Tensor, permutation: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("fastinfer::int4_pack")
def _(q: Tensor) -> Tensor:
    return q.new_empty([-(-q.shape[0] // 16), q.shape[1] // 32, 4, 16, 4])


@register_fake("fastinfer::int8_pack")
def _(q: Tensor) -> Tensor:
    return q.new_empty([-(-q.shape[0] // 16), q.shape[1] // 32, 8, 16, 4])


@register_fake("fastinfer::int4_dequantize")
@register_fake("fastinfer::int8_dequantize")
def _(qweight, scales, mins, out_features, rows, dtype) -> Tensor:  # type: ignore[no-untyped-def]
    count = out_features if rows is None else rows.shape[0]
    return qweight.new_empty([count, qweight.shape[1] * 32], dtype=dtype)


@register_fake("fastinfer::sample")
def _(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, count = logits.shape[0], args[-1]
    tokens, top_tokens = logits.new_empty([rows], dtype=torch.int64), logits.new_empty([rows, count], dtype=torch.int64)
    return tokens, logits.new_empty([rows]), logits.new_empty([rows, count]), top_tokens
