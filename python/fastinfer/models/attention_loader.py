"""Reading of the attention of one layer."""

import torch
from torch import Tensor

from fastinfer.models.attention import Attention
from fastinfer.models.layer_reader import LayerReader, Part
from fastinfer.models.norm import factor_norm
from fastinfer.models.position_tables import PositionTables
from fastinfer.weights.weight import Weight


def load_attention(reader: LayerReader, tables: PositionTables, index: int, *, is_split: bool = False) -> Attention:
    """Read the attention of a layer; with ``is_split`` queries, keys and values have a weight each."""
    config, layer = reader.config, f"layers.{index}"
    shape, q_size, kv_size = config.kv_shape(index), config.q_size(index), config.kv_size(index)
    has_kv = config.kv_layer(index) == index
    q_norm = k_norm = None
    qk_norm = "none" if index in config.unnormed_layers else config.qk_norm
    is_joint = qk_norm == "all"
    if qk_norm == "unit":
        k_norm = torch.ones(shape.head_dim, dtype=torch.float32, device=reader.device)
        q_norm = k_norm * config.query_scale
    elif qk_norm == "head":
        q_norm = reader.vector(f"{layer}.q_norm", shape.head_dim)
        k_norm = reader.vector(f"{layer}.k_norm", shape.head_dim) if has_kv else None
    scale, factor = reader.scale, 1.0
    if config.layer_scales and index == 0:
        scale = factor = config.embedding_scale
    value_dim = config.value_dim or shape.head_dim
    window = config.window(index)
    rope = tables.unrotated if index in config.unrotated_layers else tables.local if window else tables.full
    return Attention(
        num_heads=config.query_heads(index),
        num_kv_heads=shape.num_heads,
        head_dim=shape.head_dim,
        norm=reader.pre_norm(f"{layer}.attention_norm", scale, config.attention_input_scale),
        qkv=_qkv(reader, index, is_split=is_split or is_joint),
        output=reader.output(
            f"{layer}.o_proj",
            config.attention_size(index),
            config.output_bias,
            f"{layer}.post_attention_norm",
            scale,
            factor,
        ),
        cos_sin_cache=tables.unrotated if config.rotated_first else rope,
        first_cos_sin_cache=rope if config.rotated_first else None,
        q_norm=q_norm,
        k_norm=k_norm,
        has_kv=has_kv,
        joint_q_norm=reader.heads_norm(f"{layer}.q_norm", q_size) if is_joint else None,
        joint_k_norm=reader.heads_norm(f"{layer}.k_norm", kv_size) if is_joint and has_kv else None,
        qk_norm_eps=config.norm_eps,
        v_norm=config.v_norm,
        tied_kv=index in config.tied_kv_layers,
        query_scales=tables.query_scales if config.has_growing_queries(index) else None,
        interleaved=config.interleaved_rope,
        window=window,
        chunked=config.chunked_windows,
        gate_size=config.gate_size(index),
        softplus_gate=config.softplus_gate,
        value_columns=torch.arange(value_dim, device=reader.device) if config.value_dim else None,
        value_norm=None if config.value_scale == 1.0 else factor_norm(config.value_scale, value_dim, reader.device),
        softcap=config.attention_softcap,
        scale=config.attention_scale,
        sinks=reader.vector(f"{layer}.sinks", config.query_heads(index)) if config.has_sinks(index) else None,
    )


def _qkv(reader: LayerReader, index: int, is_split: bool) -> Weight:
    """Read the projections of queries, keys and values; of queries alone for a layer without keys of its own.

    With an output gate that is no projection of its own, the file's query projection has the rows of each head's
    query and then those of its gate. The rows of all gates come last here.
    """
    config, layer = reader.config, f"layers.{index}"
    q_size, kv_size = config.q_size(index), config.kv_size(index)
    is_whole = config.output_gate and not config.separate_gate
    num_halves = 2 if is_whole else 1
    sizes = {f"{layer}.q_proj": num_halves * q_size}
    if config.kv_layer(index) == index:
        sizes[f"{layer}.k_proj"] = kv_size
        if index not in config.tied_kv_layers:
            sizes[f"{layer}.v_proj"] = config.value_size(index)
    if config.separate_gate:
        sizes[f"{layer}.output_gate"] = config.gate_size(index)
    if not is_whole:
        parts = [
            _selected(part, config.value_rows(index)) if config.value_dim and part[0].endswith(".v_proj") else part
            for part in reader.read(sizes, config.qkv_bias)
        ]
        # The norm of a whole row needs it contiguous.
        return reader.joined(parts, is_split)
    q, *kv = reader.read(sizes, config.qkv_bias)
    queries, gates = (_selected(q, rows) for rows in config.query_rows(index))
    return reader.joined([queries, *kv, gates], is_split)


def _selected(part: Part, rows: Tensor) -> Part:
    """Return some rows of a matrix, and of its bias."""
    name, matrix, bias = part
    return name, matrix.rows(rows), None if bias is None else bias[rows]
