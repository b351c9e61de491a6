"""Reading of the latent attention of one layer, and of its indexer."""

import torch

from fastinfer.formats.unpacked import Dense, Grouped, Unpacked
from fastinfer.models.config import LatentAttentionConfig
from fastinfer.models.indexer import Indexer
from fastinfer.models.latent_attention import LatentAttention
from fastinfer.models.layer_reader import LayerReader, unquantized
from fastinfer.models.norm import LayerNorm, RMSNorm
from fastinfer.models.position_tables import PositionTables
from fastinfer.weights.weight import ConcatenatedWeight, Weight

NORM_EPS = 1e-6  # of the norms of latents and of indexers' keys, which no file says


def load_latent_attention(
    reader: LayerReader, tables: PositionTables, index: int, sizes: LatentAttentionConfig
) -> LatentAttention:
    """Read the latent attention of a layer."""
    config, layer = reader.config, f"layers.{index}"
    q_size, scale = config.num_heads * sizes.query_dim, config.attention_scale
    assert scale is not None
    query = query_norm = None
    if sizes.query_rank:
        q_b = reader.checkpoint.linear(f"{layer}.q_b_proj", q_size, sizes.query_rank)
        query = reader.weight((f"{layer}.q_b_proj",), q_b, None)
        query_norm = RMSNorm(reader.vector(f"{layer}.q_a_norm", sizes.query_rank), NORM_EPS)
    first = {f"{layer}.q_a_proj": sizes.query_rank} if sizes.query_rank else {f"{layer}.q_proj": q_size}
    gates = {f"{layer}.output_gate": config.gate_size(index)} if config.head_gate else {}
    keys, values = _key_and_value_matrices(reader, layer, sizes)
    return LatentAttention(
        num_heads=config.num_heads,
        sizes=sizes,
        norm=reader.pre_norm(f"{layer}.attention_norm"),
        # Whole rows of the first are normalised, and heads of it are rows: it must be contiguous.
        down=reader.concatenated(first | {f"{layer}.kv_a_proj": sizes.row_dim} | gates, has_bias=False, is_split=True),
        query_norm=query_norm,
        query=query,
        latent_norm=RMSNorm(reader.vector(f"{layer}.kv_a_norm", sizes.rank), NORM_EPS),
        keys=reader.make_experts(keys),
        values=reader.make_experts(values),
        output=reader.output(
            f"{layer}.o_proj", config.num_heads * sizes.value_dim, False, f"{layer}.post_attention_norm"
        ),
        cos_sin_cache=tables.unrotated if index in config.unrotated_layers else tables.full,
        interleaved=config.interleaved_rope,
        head_ids=torch.arange(config.num_heads, dtype=torch.int32, device=reader.device)[None],
        query_scales=tables.query_scales,
        scale=scale,
        gated=config.head_gate,
        indexer=_indexer(reader, tables, index, sizes.query_rank),
    )


def _indexer(reader: LayerReader, tables: PositionTables, index: int, query_rank: int) -> Indexer | None:
    """Read the indexer of a layer; None if it has none. Like a router it is not quantised by calibration."""
    layer, sizes, hidden = f"layers.{index}", reader.config.indexer, reader.config.hidden_size
    if sizes is None or not reader.config.has_indexer(index):
        return None

    def weight(name: str, rows: int, columns: int, activation_bits: int) -> Weight:
        return reader.make(reader.checkpoint.linear(f"{layer}.{name}", rows, columns), activation_bits)

    norm, bits = f"{layer}.index_k_norm", reader.precision.activation_bits
    key = weight("index_k_proj", sizes.head_dim, hidden, 32)
    heads = weight("index_weights", sizes.num_heads, hidden, 32)
    return Indexer(
        sizes=sizes,
        down=ConcatenatedWeight((key, heads)),  # apart, as keys are normalised as whole rows
        key_norm=LayerNorm(
            reader.vector(norm, sizes.head_dim), reader.vector(f"{norm}.bias", sizes.head_dim), NORM_EPS
        ),
        query=weight("index_q_proj", sizes.num_heads * sizes.head_dim, query_rank, bits),
        cos_sin_cache=tables.full,
    )


def _key_and_value_matrices(
    reader: LayerReader, layer: str, sizes: LatentAttentionConfig
) -> tuple[list[Unpacked], list[Unpacked]]:
    """Read each head's matrices: [rank, plain_dim] for keys, [value_dim, rank] for values.

    A file that does not have them transposed cannot have groups of inputs in the first: that is not quantised then.
    """
    heads, linear = reader.config.num_heads, reader.checkpoint.linear
    if f"{layer}.k_b_proj" in reader.checkpoint:
        stacks = (("k_b_proj", sizes.rank, sizes.plain_dim), ("v_b_proj", sizes.value_dim, sizes.rank))
        keys, values = (
            _parts_of_rows(linear(f"{layer}.{name}", heads * rows, columns), rows) for name, rows, columns in stacks
        )
        return keys, values
    rows = sizes.plain_dim + sizes.value_dim
    both = linear(f"{layer}.kv_b_proj", heads * rows, sizes.rank)
    if isinstance(both, Grouped) and both.permutation is not None:
        both = unquantized(reader, both)
    parts = _parts_of_rows(both, rows)
    untransposed = [unquantized(reader, part.rows(slice(0, sizes.plain_dim))) for part in parts]
    transposed: list[Unpacked] = [Dense(matrix.values.T.contiguous()) for matrix in untransposed]
    return transposed, [part.rows(slice(sizes.plain_dim, None)) for part in parts]


def _parts_of_rows(weight: Unpacked, count: int) -> list[Unpacked]:
    """Cut a weight into parts of this number of rows."""
    return [weight.rows(slice(first, first + count)) for first in range(0, weight.shape[0], count)]
