"""Memory of a model and its KV cache, and lower bounds on its times, computed without loading the whole model.

A decode step or a prefill takes at least the time to read its weights and its cached keys and values once, and to read
and write its states in layers with linear attention. It also takes at least the time of its operations at the
arithmetic peak, that of tiles for prompts where these are used. The rates are measured by loops that do nothing else
(the "roofline" model of Williams et al., 2009,
https://doi.org/10.1145/1498765.1498785).
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastinfer import _C
from fastinfer.engine.cache_sizes import cache_sizes
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import kv_cache_size, modules_obstacle
from fastinfer.engine.kv_cache_size import Room
from fastinfer.engine.placement import common_dtype, place_model, weight_bytes_by_device
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import KVShape, ModelConfig, Precision
from fastinfer.models.kv_cache import num_blocks_for
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.sparse_attention import codes_bytes, has_key_codes, has_value_codes
from fastinfer.models.state_cache import state_bytes
from fastinfer.utils.device import resolve_places
from fastinfer.utils.places import parse_places
from fastinfer.weights.expert_weights import DenseExperts, ExpertWeights
from fastinfer.weights.weight import DenseWeight, Weight

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
TABLES = ("cos_sin_cache", "first_cos_sin_cache", "query_scales")  # of positions, in the parts of layers
BLOCK_INPUTS = 32  # number of inputs in a block of a packed weight
READ_BYTES = 256 << 20  # more than the last-level cache of nearly all machines
SAMPLE_S = 0.03
SAMPLES = 5
ANY_ROOM = 2**62  # bytes, more than any cache


@dataclass(frozen=True)
class Rates:
    """Peak rates of the CPU per second: bytes read from memory, operations on bytes, floating-point operations.

    The last two are those of int8 and bf16 products in tiles, which compute prompts where ``fastinfer`` uses AMX; 0
    elsewhere.
    """

    read_bytes: float
    byte_operations: float
    float_operations: float
    byte_tile_operations: float = 0.0
    float_tile_operations: float = 0.0

    @classmethod
    def measure(cls) -> "Rates":
        """Measure the rates on all threads, as the best of a few samples; takes about a second.

        Load from other programs lowers them.
        """
        memory = torch.ones(READ_BYTES, dtype=torch.uint8)  # zeros would all map to one page
        float_rates = (_best_rate(name, memory[:0]) for name in ("fp32_fma", "bf16_dot"))
        tile_rates = (_best_rate(name, memory[:0]) for name in ("int8_tiles", "bf16_tiles"))
        return cls(_best_rate("read", memory), _best_rate("byte_dot", memory[:0]), max(float_rates), *tile_rates)


def _best_rate(resource: str, memory: Tensor) -> float:
    """Return the best rate of a few samples, 0 if the CPU has no such instruction."""
    data: Any = memory.numpy()
    passes, samples = 1, list[float]()
    while len(samples) < SAMPLES:
        work, seconds = _C.roofline(resource, data, passes)
        if work == 0:
            return 0.0
        if seconds < SAMPLE_S:
            passes *= 2
        else:
            samples.append(work / seconds)
    return max(samples)


@dataclass
class Weights:
    """Memory and work of a loaded model.

    Attributes:
        memory_bytes: size of all weights in memory.
        step_bytes: bytes read in every step, without experts.
        expert_bytes: bytes of all experts, of which a step reads some.
        byte_operations, float_operations: operations of the layers per token, by kind of arithmetic.
        reading_byte_operations, reading_float_operations: those of the layers that store nothing, which only the last
            token of a prompt needs.
        logits_byte_operations, logits_float_operations: operations of the output projection per sequence and step.
    """

    memory_bytes: int = 0
    step_bytes: int = 0
    expert_bytes: int = 0
    byte_operations: int = 0
    float_operations: int = 0
    reading_byte_operations: int = 0
    reading_float_operations: int = 0
    logits_byte_operations: int = 0
    logits_float_operations: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_model_len: int | None = None) -> "Weights":
        """Load the parts of a model one at a time and add them up.

        The parts are the embedding, the output projection and one layer of each layout. They come from the loader of
        the engine, so the sizes agree with it; only the rotary tables are made for one position, and counted for those
        of ``max_model_len`` tokens, by default of the model's limit.

        Raises:
            GGUFFormatError, CheckpointFormatError, UnsupportedModelError: the model cannot be loaded.
        """
        loader = DecoderLoader(LayerReader(checkpoint, Precision.of("auto"), "cpu"), 1)
        embedding = cls()._include(loader.embedding())
        lm_head = loader.lm_head()
        head = embedding if lm_head is None else cls()._include(lm_head)
        weights = cls(
            memory_bytes=embedding.memory_bytes + (0 if lm_head is None else head.memory_bytes),
            step_bytes=head.step_bytes,  # a step reads only some rows of the embedding
            logits_byte_operations=head.byte_operations,
            logits_float_operations=head.float_operations,
        )
        weights._include((loader.norm(), loader.embedding_norm()))
        if (positions := loader.position_embedding()) is not None:
            weights.memory_bytes += positions.nbytes
        if (inputs := loader.per_layer_inputs()) is not None:
            weights._include((inputs.projection, inputs.norm))
            weights.memory_bytes += cls()._include(inputs.embedding).memory_bytes
        table_length = checkpoint.config.table_length(max_model_len)
        layers: dict[Hashable, Weights] = {}
        tables: dict[int, int] = {}
        for index in range(checkpoint.config.num_layers):
            is_rotated = index not in checkpoint.config.unrotated_layers
            has_kv = checkpoint.config.kv_layer(index) == index
            layout = checkpoint.layout(index), checkpoint.config.window(index), is_rotated, has_kv
            if layout not in layers:
                layer = loader.layer(index)
                checkpoint.release()
                layers[layout] = cls()._include(layer)
                for name in TABLES:
                    table = getattr(layer.attention, name, None)
                    if table is not None:
                        tables[table.data_ptr()] = table.nbytes * table_length
                del layer
            reads = index >= checkpoint.config.num_storing_layers
            weights._add(layers[layout]._of_reading_layer() if reads else layers[layout])
        weights.memory_bytes += sum(tables.values())
        return weights

    def read_bytes(self, config: ModelConfig, tokens: int) -> float:
        """Return the expected bytes that a step with ``tokens`` tokens reads, if each draws its experts at random."""
        if not config.num_experts:
            return self.step_bytes
        chosen = 1 - (1 - config.experts_per_token / config.num_experts) ** tokens
        return self.step_bytes + self.expert_bytes * chosen

    def _of_reading_layer(self) -> "Weights":
        """Return the weights of a layer that stores nothing."""
        return replace(
            self,
            byte_operations=0,
            float_operations=0,
            reading_byte_operations=self.byte_operations,
            reading_float_operations=self.float_operations,
        )

    def _add(self, other: "Weights") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def _include(self, part: Any, share: float = 1.0) -> "Weights":
        """Add the tensors of nested dataclasses, except the tables of positions, which layers share.

        A token uses a fraction ``share`` of the weights.
        """
        if isinstance(part, Tensor):
            self.memory_bytes += part.nbytes
            self.step_bytes += part.nbytes
        elif isinstance(part, tuple):
            for each in part:
                self._include(each, share)
        elif isinstance(part, MixtureOfExperts):
            self._include((part.norm, part.router, part.choice_bias, part.shared))
            self._include((part.router_norm, part.expert_scale, part.post_norm, part.latents))
            experts = Weights()._include((part.gate_up, part.down), part.top_k / part.router.out_features)
            self._add(replace(experts, step_bytes=0, expert_bytes=experts.step_bytes))
        elif is_dataclass(part):
            for field in fields(part):
                if field.name not in TABLES:
                    self._include(getattr(part, field.name), share)
            if isinstance(part, DenseWeight | DenseExperts):
                self.float_operations += round(2 * part.values.numel() * share)
            elif isinstance(part, Weight | ExpertWeights) and hasattr(part, "qweight"):
                *num_experts, _, blocks = part.qweight.shape[:-3]
                operations = round(2 * math.prod(num_experts) * part.out_features * blocks * BLOCK_INPUTS * share)
                # Products with inputs that are not rounded are computed in fp32.
                if getattr(part, "activation_bits", 8) == 32:
                    self.float_operations += operations
                else:
                    self.byte_operations += operations
        return self


def kv_cache_bytes(
    config: ModelConfig,
    num_kv_heads: int,
    dtype: torch.dtype,
    context: int,
    batch: int,
    *,
    layers: Iterable[int] | None = None,
    num_drafts: int = 0,
) -> int:
    """Return the size of the KV cache that an engine makes for ``batch`` sequences of ``context`` tokens.

    It is that of ``max_num_seqs=batch`` and ``max_model_len=context``, for sequences that all use the whole length:
    with scales, with the blocks that layers with an attention window need beside a step of prompts, and with slots for
    the states of sequences, their snapshots and their drafts. With ``layers``, only these count. All layers have
    ``num_kv_heads`` heads, or each its own number if that is the model's.
    """
    if num_kv_heads != config.num_kv_heads:
        shapes = tuple(replace(shape, num_heads=num_kv_heads) for shape in config.kv_shapes)
        config = replace(config, num_kv_heads=num_kv_heads, kv_shapes=shapes)
    settings = EngineConfig(
        max_model_len=context, max_num_seqs=batch, kv_cache_dtype=dtype, num_speculative_tokens=num_drafts
    )
    size = kv_cache_size(settings, [config], Room(ANY_ROOM, ANY_ROOM), typical_tokens=context)
    counted = range(config.num_layers) if layers is None else set(layers)
    return sum(
        each.num_bytes
        * (size.num_states if each.window is None else size.num_blocks[size.group(each.window)] * settings.block_size)
        for each in cache_sizes(settings, [config])
        if each.layer in counted
    )


def device_memory(checkpoint: Checkpoint, text: str, context: int, batch: int) -> list[dict[str, Any]]:
    """Return what each device of a list of places has of a model, with a KV cache of the default dtype.

    Raises:
        RequestError: the text is no list of places, or the model cannot be divided that way.
    """
    places = parse_places(text)
    if places[0].share is None:
        places = resolve_places(text)  # their free memory decides, so they must exist
    placed, config = place_model(checkpoint, places), checkpoint.config
    names = [name for place in placed for name in place.devices]
    gpu = next((name for name in names if name != "cpu"), "cpu")
    dtype = Precision.of(common_dtype("auto", names), gpu).kv_cache_dtype
    found = []
    for name, num_bytes in weight_bytes_by_device(checkpoint, placed).items():
        layers = [layer for place in placed if place.device == name for layer in place.layers]
        experts = [layer for place in placed if place.experts == name for layer in place.layers]
        cache = kv_cache_bytes(config, config.num_kv_heads, dtype, context, batch, layers=layers)
        found.append(
            {"device": name, "num_layers": len(layers), "num_layers_of_experts": len(experts)}
            | {"weights_bytes": num_bytes, "kv_cache_bytes": cache, "kv_cache_dtype": dtype_name(dtype)}
        )
    return found


def sparse_attention_bytes(config: ModelConfig, context: int, batch: int) -> int:
    """Return the size of the codes that sparse attention keeps beside the keys and values of ``batch`` sequences."""
    layers = [layer for layer in range(config.num_layers) if has_key_codes(config, layer)]
    settings = EngineConfig()
    slots = batch * num_blocks_for(context, settings.block_size) * settings.block_size
    with_values = has_value_codes(config, settings.block_size, settings.device)
    return slots * sum(codes_bytes(config.kv_shape(layer), with_values=with_values) for layer in layers)


def module_token_bytes(config: ModelConfig, dtypes: Sequence[torch.dtype]) -> dict[str, int]:
    """Return the size of the keys and values of one token of a prompt module; empty if the model takes no modules."""
    if modules_obstacle(EngineConfig(), [config]):
        return {}
    return {
        dtype_name(dtype): sum(size.num_bytes for size in cache_sizes(EngineConfig(kv_cache_dtype=dtype), [config]))
        for dtype in dtypes
    }


def all_state_bytes(config: ModelConfig) -> int:
    """Return the size of a sequence's states in all layers that have one."""
    sizes = config.states
    return 0 if sizes is None else sum(config.state_layers) * state_bytes(sizes)


def attended_positions(config: ModelConfig, tokens: int, num_heads: int | None = None) -> Counter[KVShape]:
    """Return the number of (query, key) pairs of a prompt of ``tokens`` tokens, by the shape of the layers' keys.

    Layers that store nothing are computed for the last token alone. What indexers read is not counted. With
    ``num_heads``, only layers with this number of query heads count.
    """
    pairs: Counter[KVShape] = Counter()
    for layer in range(config.num_storing_layers):
        if not config.has_state(layer) and num_heads in (None, config.query_heads(layer)):
            most = _most_positions(config, layer, tokens)
            if config.chunked_windows and config.window(layer):
                whole, rest = divmod(tokens, config.window(layer))
                pairs[config.kv_shape(layer)] += whole * _triangle(config.window(layer)) + _triangle(rest)
            else:
                pairs[config.kv_shape(layer)] += _triangle(most) + (tokens - most) * most
    last = range(config.num_storing_layers, config.num_layers)
    return pairs + positions_of_last(config, tokens, last, num_heads)


def _triangle(tokens: int) -> int:
    """Return the number of pairs of tokens and those up to themselves."""
    return tokens * (tokens + 1) // 2


def positions_of_last(
    config: ModelConfig, tokens: int, layers: range, num_heads: int | None = None
) -> Counter[KVShape]:
    """Return the number of positions that the last of ``tokens`` tokens sees in these layers, by their keys' shape.

    With ``num_heads``, only layers with this number of query heads count.
    """
    positions: Counter[KVShape] = Counter()
    for layer in layers:
        if not config.has_state(layer) and num_heads in (None, config.query_heads(layer)):
            seen = _most_positions(config, layer, tokens)
            if config.chunked_windows and config.window(layer):
                seen = (tokens - 1) % config.window(layer) + 1
            positions[config.kv_shape(layer)] += seen
    return positions


def _most_positions(config: ModelConfig, layer: int, tokens: int) -> int:
    """Return the most positions that one of ``tokens`` tokens attends to in a layer."""
    chosen = tokens if config.indexer is None else config.indexer.top_k
    return min(config.window(layer) or tokens, chosen, tokens)


def head_layouts(config: ModelConfig) -> dict[str, int]:
    """Return the number of KV heads in each head layout, the model's own first.

    MHA has one KV head per query head, MQA has a single one, MLA one whose values are within its keys. Where layers
    have different numbers of query heads, there is no MHA.
    """
    if config.latent_attention is not None:
        return {"MLA": config.num_kv_heads}
    own = {min(config.layer_heads, default=config.num_heads): "MHA", 1: "MQA"}.get(config.num_kv_heads, "GQA")
    every = {} if config.layer_heads else {"MHA": config.num_heads}
    return {own: config.num_kv_heads} | every | {"MQA": 1}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a cache's dtype for the user; uint8 holds int4."""
    return "int4" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")
