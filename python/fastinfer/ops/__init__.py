"""Inference kernels as PyTorch operators.

Every function here is a thin, typed wrapper of ``torch.ops.fastinfer.<same name>``; the kernels are C++ and CUDA.
The operators have no gradient: an activation, a cache or a state that requires one raises, unless the call is under
``torch.inference_mode()`` or ``torch.no_grad()``. Weights may be Parameters, but get no gradient.

Functions that return one tensor of activations or packed weights take ``out=``: a contiguous tensor with the result's
exact shape, dtype and device. The function writes the result into it, bitwise the same numbers, and returns it. ``out``
may be the tensor that an elementwise step reads (``x`` of the norms and of ``gelu``, ``residual`` everywhere but in
``add_rms_norm``); any other overlap with an argument raises.

All functions work under ``torch.compile(fullgraph=True)``, in ``torch.export``, in a :class:`CPUGraph` and in a
``torch.cuda.CUDAGraph``; ``torch.compile`` was not yet run on a GPU. A graph that was captured with ``out`` writes into
it at every replay. Among dynamic shapes, only numbers of tokens are safe: with a symbolic head size the Inductor of
torch 2.13 writes in-place results of a split tensor to the wrong place.

Shapes use these names: *tokens* (ragged batches are flattened, nothing is padded), *hidden*, *q_heads*, *kv_heads*,
*head_dim*, *seqs*. A wrong shape, dtype or device raises ``RuntimeError`` (``ValueError`` where Python checks it) with
the argument's name, the expected value and the value that was passed.
"""

from fastinfer.ops import _fakes  # noqa: F401  (registers shape functions)
from fastinfer.ops.activation import (
    clamped_swiglu,
    gelu,
    gelu_and_mul,
    relu2,
    sigmoid_gate,
    silu_and_mul,
    softcap,
    softplus_gate,
    xielu,
)
from fastinfer.ops.attention import merge_attention_states, paged_attention, paged_attention_plan, store_kv_cache
from fastinfer.ops.constant import constant_weights
from fastinfer.ops.embedding import embedding
from fastinfer.ops.gemm import gemm, int4_gemm, int5_gemm, int6_gemm, int8_gemm, lut_gemm
from fastinfer.ops.graph import CPUGraph, GraphCaptureError, GraphMemory
from fastinfer.ops.invariance import batch_invariant
from fastinfer.ops.linear_attention import causal_conv1d, gated_delta_rule, mamba2_scan
from fastinfer.ops.lora import add_lora
from fastinfer.ops.moe import (
    HeadRows,
    Routing,
    combine_experts,
    grouped_gemm,
    grouped_int4_gemm,
    grouped_int5_gemm,
    grouped_int6_gemm,
    grouped_int8_gemm,
    grouped_lut_gemm,
    head_rows,
    route_experts,
)
from fastinfer.ops.norm import add_rms_norm, layer_norm, rms_norm, rms_norm_quantize
from fastinfer.ops.pack import (
    int4_dequantize,
    int4_pack,
    int5_dequantize,
    int5_pack,
    int6_dequantize,
    int6_pack,
    int8_dequantize,
    int8_pack,
    interleave_gate_up,
    pack_scales,
    pack_two_level_scales,
)
from fastinfer.ops.parallel import (
    all_gather,
    all_gather_rows,
    all_reduce,
    all_reduce_add_rms_norm,
    local_ids,
)
from fastinfer.ops.permute import permute_columns
from fastinfer.ops.prompt import prompt_rows, prompt_rows_of_experts
from fastinfer.ops.quantize import quantize_int8
from fastinfer.ops.rotary import RopeScaling, cos_sin_cache, latent_rotary_store, norm_rotary_store, rotary_embedding
from fastinfer.ops.sampling import Sampled, sample
from fastinfer.ops.sparse_attention import select_pages, select_tokens, store_key_codes, store_value_codes
from fastinfer.ops.support import supported
from fastinfer.ops.w8a8 import w8a8_gemm

__all__ = [
    "CPUGraph",
    "GraphCaptureError",
    "GraphMemory",
    "HeadRows",
    "RopeScaling",
    "Routing",
    "Sampled",
    "add_lora",
    "add_rms_norm",
    "all_gather",
    "all_gather_rows",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "batch_invariant",
    "causal_conv1d",
    "clamped_swiglu",
    "combine_experts",
    "constant_weights",
    "cos_sin_cache",
    "embedding",
    "gated_delta_rule",
    "gelu",
    "gelu_and_mul",
    "gemm",
    "grouped_gemm",
    "grouped_int4_gemm",
    "grouped_int5_gemm",
    "grouped_int6_gemm",
    "grouped_int8_gemm",
    "grouped_lut_gemm",
    "head_rows",
    "int4_dequantize",
    "int4_gemm",
    "int4_pack",
    "int5_dequantize",
    "int5_gemm",
    "int5_pack",
    "int6_dequantize",
    "int6_gemm",
    "int6_pack",
    "int8_dequantize",
    "int8_gemm",
    "int8_pack",
    "interleave_gate_up",
    "latent_rotary_store",
    "layer_norm",
    "local_ids",
    "lut_gemm",
    "mamba2_scan",
    "merge_attention_states",
    "norm_rotary_store",
    "pack_scales",
    "pack_two_level_scales",
    "paged_attention",
    "paged_attention_plan",
    "permute_columns",
    "prompt_rows",
    "prompt_rows_of_experts",
    "quantize_int8",
    "relu2",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "route_experts",
    "sample",
    "select_pages",
    "select_tokens",
    "sigmoid_gate",
    "silu_and_mul",
    "softcap",
    "softplus_gate",
    "store_key_codes",
    "store_kv_cache",
    "store_value_codes",
    "supported",
    "w8a8_gemm",
    "xielu",
]
