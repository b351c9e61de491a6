"""Configuration of a decoder: its sizes and constants, and the precision in which it computes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastinfer.errors import RequestError
from fastinfer.models.state_config import StateConfig
from fastinfer.ops import RopeScaling

# A larger size in a file means that it is damaged; the product of two sizes up to this limit cannot overflow.
MAX_SIZE = 2**24
# So do more layers, for each of which memory is counted before a tensor is read.
MAX_LAYERS = 2**16


@dataclass(frozen=True)
class RouterConfig:
    """Choice and weights of a token's experts, see :func:`fastinfer.ops.route_experts`.

    Attributes:
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"sparsemixer"``.
        has_bias: whether a bias takes part in the choice.
        num_groups, top_groups: number of groups of experts, and of those that the experts are chosen from.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        scale: factor of the weights.
        jitter: half the tolerance of ``"sparsemixer"``.
        scales_inputs: whether a token's only expert gets its input times the weight, and its output has none.
        softcap: cap of the logits, 0 for none.
        biased_logits: whether the bias is added to the logits for the choice, instead of the scores.
    """

    scoring: str = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    jitter: float = 0.01
    scales_inputs: bool = False
    softcap: float = 0.0
    biased_logits: bool = False


@dataclass(frozen=True)
class KVShape:
    """Shape of the keys and values of a token in one layer.

    Attributes:
        num_heads: number of key and value heads.
        head_dim: number of elements of a head.
        value_dim: number of elements of a value if it is the beginning of the key; 0 for values of their own.
    """

    num_heads: int
    head_dim: int
    value_dim: int = 0


@dataclass(frozen=True)
class LatentAttentionConfig:
    """The sizes of layers with multi-head latent attention.

    Attributes:
        query_rank: number of elements of the latents that queries are computed from, 0 for none.
        rank: number of elements of the latents that keys and values are computed from.
        plain_dim, rotary_dim: number of elements of a query or key that are not rotated, and of those that are.
        value_dim: number of elements of a value.
    """

    query_rank: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Number of elements of a query."""
        return self.plain_dim + self.rotary_dim

    @property
    def row_dim(self) -> int:
        """Number of elements that are cached for a token: its latent, and the rotated elements of its keys."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True)
class IndexerConfig:
    """The sizes of indexers, which choose the tokens that latent attention reads.

    Attributes:
        num_heads: number of heads of the queries.
        head_dim: number of elements of such a head, and of the key of a token. The first ones are rotated, as many as
            in the queries and keys of attention.
        top_k: number of tokens that each token reads at most.
        interleaved_rope: see :class:`ModelConfig`.
        layers: for each layer of the model, the one whose indexer chooses for it: itself or an earlier one.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved_rope: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class BlockConfig:
    """Settings of a draft head that drafts a block of tokens at once, as it was trained.

    In layers without a window a token sees the whole block. In those with one it sees none of the tokens behind it,
    and its window ends with itself; or it sees the whole block, and the window ends with that.

    Attributes:
        feature_layers: the layers of the model whose outputs it reads, in ascending order.
        mask_token: token in the place of those to draft.
        size: number of tokens of a block, the newest token of the text and the masks.
        drafts_next: whether the output at a token is the draft of the next place, so that the newest token gives one,
            too, and the last draft has no mask; otherwise the output at a mask is the draft of its own place.
        is_causal: whether a token sees none of those behind it in layers without a window, too.
        has_whole_windows: whether a token sees the whole block in layers with a window, too.
        conv_taps: number of tokens that the convolutions of a layer read, see
            :class:`fastinfer.models.block_conv.BlockConv`; 0 for a head without.
        conv_group_size: number of neighbouring channels whose kernels have the same dynamic part.
        selector_rank, selector_top_k: length of the vectors by which a token is chosen after the one before, and
            number of tokens among which it is chosen, see :class:`fastinfer.models.draft_chain.CandidateSelector`; 0
            for a head without.
        markov_rank: length of the vectors by which logits depend on the token before, see
            :class:`fastinfer.models.draft_chain.MarkovBias`; 0 for a head without.
    """

    feature_layers: tuple[int, ...]
    mask_token: int
    size: int
    drafts_next: bool = False
    is_causal: bool = False
    has_whole_windows: bool = False
    conv_taps: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0

    @property
    def max_drafts(self) -> int:
        """Number of drafts of a whole block."""
        return self.size if self.drafts_next else self.size - 1


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder-only transformer.

    Attributes:
        architecture: name of the model family in the file.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP, or of one expert.
        dense_intermediate_size: width of the MLP in the ``dense_layers``.
        shared_intermediate_size: width of the expert that all tokens have besides their own, 0 for none.
        num_layers: number of layers.
        num_heads, num_kv_heads: number of query heads, and of key and value heads; equal groups of query heads share
            a KV head.
        layer_heads: number of query heads of each layer; empty if all layers have ``num_heads``, which is otherwise the
            largest one.
        head_dim: number of elements of a head.
        kv_shapes: shape of each layer's keys and values; empty if all layers have ``num_kv_heads`` and ``head_dim``.
        value_dim: number of elements of a value where it has fewer than a key; 0 for as many. The cache has as many,
            and the last ones are not used.
        value_scale: factor of the values.
        kv_layers: the layer whose keys and values each layer attends to, itself or an earlier one with the same shape
            and window; empty if every layer has its own.
        rotary_dim: number of rotated elements of a head; 0 for a model with learned positions.
        vocab_size: number of tokens, the rows of the embedding.
        draft_vocab_size: number of tokens that a draft model can draft, the rows of its output layer; 0 for all.
        max_position: longest context in tokens.
        norm_eps: number added to the mean of squares, or to the variance.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies.
        local_rope_theta: base in the layers with a window, without scaling; ``None`` to use the same table in all
            layers.
        local_rotary_dim: number of rotated elements of a head there, 0 for ``rotary_dim``.
        windows: length of each layer's attention window in positions, 0 for none; empty if no layer has a window.
        chunked_windows: whether windows are chunks of the text: a token sees those of its own chunk up to itself.
        state_layers: whether each layer has linear attention, Mamba-2 or a short convolution, and a state instead of
            keys and values; empty if none has.
        states: sizes of these layers; ``None`` if there are none.
        latent_attention: sizes of multi-head latent attention, which all layers without a state then have;
            ``num_kv_heads`` is 1 and ``head_dim`` that of the cached rows. ``None`` for another attention.
        indexer: what chooses the tokens that such attention reads; ``None`` if it reads all.
        output_gate: whether the output of attention is multiplied by the sigmoid of a second half of the query
            projection.
        separate_gate: whether that is a projection of its own.
        head_gate: whether that has one element for each head, by which the whole head is multiplied.
        softplus_gate: whether the softplus takes the place of the sigmoid.
        unrotated_layers: the layers whose queries and keys are not rotated (NoPE).
        interleaved_rope: whether elements 2i and 2i + 1 of a head are rotated together, instead of i and
            i + rotary_dim / 2.
        reversed_rope: whether they are rotated in the other direction.
        stored_layers: for each layer, the file's layer with its attention or state, and the one with its MLP, ``None``
            for no MLP, where these are not the same; empty if they are. If two layers have their attention or state in
            the same one, they have the same input, see :meth:`is_parallel`.
        activation: activation of the MLP, by its name in :mod:`fastinfer.ops.gemm`; without a gate also ``"relu2"`` or
            ``"xielu"``.
        gated: whether the MLP multiplies the activated gate by a second projection.
        swiglu_limits: for each layer, the limit of both factors in its MLP or experts, see
            :func:`fastinfer.ops.silu_and_mul`; 0 for none. Empty if no layer has one.
        shared_swiglu_limits: the same for the expert that all tokens have.
        norm: ``"rms_norm"`` or ``"layer_norm"``.
        norm_bias: whether LayerNorms have a bias.
        pre_norms: whether the inputs of attention and MLP are normalised.
        post_norms: whether the outputs of attention and MLP are normalised before they are added to the residual
            stream.
        state_pre_norms: whether that is so in layers without a state alone, and the others have norms of the inputs.
        norm_weights: whether the norms of the residual stream have a weight.
        qk_norm: whether Q and K are normalised before they are rotated: ``"none"``, ``"head"`` for each head by itself,
            ``"all"`` for all heads of a token together, or ``"unit"`` for each head without a weight.
        rotated_first: whether they are rotated before the norms of their heads instead.
        unnormed_layers: the layers where they are not normalised.
        query_scale: factor of Q after such a norm without a weight.
        query_growth, query_length, query_offset: Q at position p is multiplied by
            ``1 + query_growth * log(1 + (p + query_offset) // query_length)``.
        growing_layers: the layers where that is so; ``None`` for all.
        v_norm: whether each head of V is normalised, without a weight.
        tied_kv_layers: the layers whose values are their keys, before norm and rotation.
        layer_scales: whether the output of each layer, residual stream included, is multiplied by a number.
        per_layer_size: width of an input that each layer has of its own for each token, from a second embedding; 0 for
            none.
        parallel: whether the MLP has the same input as attention, instead of attention's output.
        qkv_bias, output_bias, mlp_bias: whether these projections have a bias; with experts, the router has one, too.
        lm_head_bias: whether the output layer has a bias.
        post_norm_eps: ``norm_eps`` of the outputs of attention and MLP, where it is another one.
        embedding_scale: factor of the embedding.
        normed_embedding: whether the rows of the embedding are normalised, without a weight.
        attention_input_scale, mlp_input_scale: factors of the normalised inputs of attention and MLP.
        residual_scale: factor of the outputs of attention and MLP.
        attention_scale: factor of the attention logits, ``None`` for ``head_dim ** -0.5``.
        attention_sinks: whether each query head has a learned logit that takes part in the softmax and has no value.
        full_sinks: whether layers without a window have such logits, too.
        attention_softcap, logits_softcap: caps of the attention logits and of the logits, 0 for none.
        logits_scale: factor of the logits.
        num_experts: number of experts per layer, 0 for a model without experts.
        experts_per_token: number of experts chosen for each token.
        expert_latent_size: number of inputs and outputs of an expert, where those are projections of the hidden states;
            0 if experts read and write hidden states.
        router: how they are chosen.
        dense_layers: the layers of a model with experts that have an MLP instead.
        mlp_beside_experts: whether layers with experts have an MLP of ``dense_intermediate_size``, too, and the router
            a norm of its own and a factor for each expert, as in Gemma 4.
        experts_post_norm: whether the output of experts is normalised before it is added to the residual stream, in
            models that do not normalise that of an MLP.
        shared_expert_gate: whether the output of the shared expert is multiplied by the sigmoid of a logit.
        experts_scale: factor of the sum of all experts, the shared one included.
        alternating_gate_up: whether the rows of gate and up alternate in a fused matrix, instead of all rows of gate
            coming first.
        has_features: whether the model is a draft head whose cache has features of ``hidden_size`` under each token,
            see :class:`fastinfer.models.draft_head.ChainHead`.
        block: what a draft head reads that drafts a block at once, see :mod:`fastinfer.models.dflash_head`; ``None``
            for other models.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    dense_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    draft_vocab_size: int = 0
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    local_rope_theta: float | None = None
    local_rotary_dim: int = 0
    windows: tuple[int, ...] = ()
    chunked_windows: bool = False
    layer_heads: tuple[int, ...] = ()
    kv_shapes: tuple[KVShape, ...] = ()
    value_dim: int = 0
    value_scale: float = 1.0
    kv_layers: tuple[int, ...] = ()
    state_layers: tuple[bool, ...] = ()
    states: StateConfig | None = None
    latent_attention: LatentAttentionConfig | None = None
    indexer: IndexerConfig | None = None
    output_gate: bool = False
    separate_gate: bool = False
    head_gate: bool = False
    softplus_gate: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    interleaved_rope: bool = False
    reversed_rope: bool = False
    stored_layers: tuple[tuple[int, int | None], ...] = ()
    activation: str = "silu"
    gated: bool = True
    swiglu_limits: tuple[float, ...] = ()
    shared_swiglu_limits: tuple[float, ...] = ()
    norm: str = "rms_norm"
    norm_bias: bool = True
    norm_weights: bool = True
    pre_norms: bool = True
    post_norms: bool = False
    state_pre_norms: bool = False
    qk_norm: str = "none"
    rotated_first: bool = False
    unnormed_layers: frozenset[int] = frozenset()
    query_scale: float = 1.0
    query_growth: float = 0.0
    query_length: int = 1
    query_offset: int = 0
    growing_layers: frozenset[int] | None = None
    v_norm: bool = False
    tied_kv_layers: frozenset[int] = frozenset()
    layer_scales: bool = False
    per_layer_size: int = 0
    parallel: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    post_norm_eps: float | None = None
    embedding_scale: float = 1.0
    normed_embedding: bool = False
    attention_input_scale: float = 1.0
    mlp_input_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_sinks: bool = False
    full_sinks: bool = True
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    logits_scale: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_latent_size: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)
    dense_layers: frozenset[int] = frozenset()
    mlp_beside_experts: bool = False
    experts_post_norm: bool = False
    shared_expert_gate: bool = False
    experts_scale: float = 1.0
    alternating_gate_up: bool = False
    has_features: bool = False
    block: BlockConfig | None = None

    @property
    def is_draft_head(self) -> bool:
        """Whether the model drafts from the hidden states of another one, and cannot do without."""
        return self.has_features or self.block is not None

    def window(self, layer: int) -> int:
        """Return the length of a layer's attention window in positions, 0 for none."""
        return self.windows[layer] if self.windows else 0

    def kv_shape(self, layer: int) -> KVShape:
        """Return the shape of a layer's keys and values."""
        if self.latent_attention is not None:
            return KVShape(1, self.latent_attention.row_dim, self.latent_attention.rank)
        return self.kv_shapes[layer] if self.kv_shapes else KVShape(self.num_kv_heads, self.head_dim)

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer has an indexer of its own."""
        return self.indexer is not None and self.indexer.layers[layer] == layer

    def table_length(self, max_model_len: int | None) -> int:
        """Return the number of positions in the tables that layers look up by position.

        Args:
            max_model_len: longest sequence in tokens; ``None`` for the model's limit. A draft head follows a model, so
                it has no limit of its own.
        """
        length = max_model_len or self.max_position
        return length if self.is_draft_head else min(length, self.max_position)

    def check_length(self, length: int) -> None:
        """Check that a text of ``length`` tokens fits into the longest context.

        Raises:
            RequestError: it does not.
        """
        if length > self.max_position:
            raise RequestError(f"context: expected at most the model's {self.max_position} positions, got {length}")

    @property
    def stream_scale(self) -> float:
        """Number by which the residual stream is smaller than that of the checkpoint's model.

        The embedding is not multiplied by its scale s, so the residual stream is smaller by the factor s. RMSNorm gives
        the same result with eps / s^2, and layers add less because their post-norm weights are divided by s. Without
        post-norms s is the factor of what layers add, and the embedding is multiplied by the quotient. Where layers
        have a scale of their own, the first sum is multiplied by s, and the stream is then the model's.
        """
        if self.layer_scales:
            return 1.0
        return self.embedding_scale if self.post_norms else self.residual_scale

    @property
    def num_storing_layers(self) -> int:
        """Number of layers up to the last one that stores keys and values of its own or a state.

        The layers after it only read, so what they compute for a token is of use to that token alone.
        """
        return max(layer for layer in range(self.num_layers) if self.kv_layer(layer) == layer) + 1

    def query_heads(self, layer: int) -> int:
        """Return the number of query heads of a layer."""
        return self.layer_heads[layer] if self.layer_heads else self.num_heads

    def swiglu_limit(self, layer: int) -> float | None:
        """Return the limit of both factors in the MLP or the experts of a layer, ``None`` for none."""
        return (self.swiglu_limits[layer] or None) if self.swiglu_limits else None

    def shared_swiglu_limit(self, layer: int) -> float | None:
        """Return the same for the expert of a layer that all tokens have."""
        return (self.shared_swiglu_limits[layer] or None) if self.shared_swiglu_limits else None

    def q_size(self, layer: int) -> int:
        """Return the number of elements of all queries of a token."""
        return self.query_heads(layer) * self.kv_shape(layer).head_dim

    def gate_size(self, layer: int) -> int:
        """Return the number of elements of a token's gate of attention's output, 0 for none."""
        if not self.output_gate:
            return 0
        return self.query_heads(layer) if self.head_gate else self.q_size(layer)

    def query_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return which rows of a file's query projection are queries and which are gates of attention's output.

        For a gate that is no projection of its own: each head's query is followed by its gate.
        """
        queries, gates = torch.arange(2 * self.q_size(layer)).view(self.query_heads(layer), 2, -1).unbind(1)
        return queries.flatten(), gates.flatten()

    def attention_size(self, layer: int) -> int:
        """Return the number of inputs of the projection behind a layer's attention, or what it has in its place."""
        if self.has_state(layer):
            assert self.states is not None
            return self.states.output_size
        if self.latent_attention is not None:
            return self.num_heads * self.latent_attention.value_dim
        return self.query_heads(layer) * self.value_dim if self.value_dim else self.q_size(layer)

    def has_growing_queries(self, layer: int) -> bool:
        """Return whether the queries of a layer grow with their position."""
        return self.query_growth > 0 and (self.growing_layers is None or layer in self.growing_layers)

    def has_sinks(self, layer: int) -> bool:
        """Return whether the query heads of a layer have learned logits without a value."""
        return self.attention_sinks and (self.full_sinks or self.window(layer) > 0)

    def value_rows(self, layer: int) -> Tensor:
        """Return the row of a file's value projection for each element of the cached values.

        Those behind ``value_dim`` have the row of the last one before them.
        """
        heads, elements = torch.arange(self.kv_shape(layer).num_heads), torch.arange(self.kv_shape(layer).head_dim)
        return (heads[:, None] * self.value_dim + elements.clamp(max=self.value_dim - 1)).flatten()

    def value_size(self, layer: int) -> int:
        """Return the number of rows of a layer's value projection."""
        shape = self.kv_shape(layer)
        return shape.num_heads * (self.value_dim or shape.head_dim)

    def kv_size(self, layer: int) -> int:
        """Return the number of elements of all keys of a token, or of all its values."""
        shape = self.kv_shape(layer)
        return shape.num_heads * shape.head_dim

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts."""
        return not self.stored_layers or self.stored_layers[layer][1] is not None

    def is_parallel(self, layer: int) -> bool:
        """Return whether a layer's attention has the same input as the layer before, instead of its output."""
        stored = self.stored_layers
        return layer > 0 and bool(stored) and stored[layer][0] == stored[layer - 1][0]

    @property
    def has_parallel_layers(self) -> bool:
        """Whether :meth:`is_parallel` holds for a layer."""
        return any(map(self.is_parallel, range(self.num_layers)))

    @property
    def num_stored_layers(self) -> int:
        """Number of the file's layers."""
        numbers = (number for pair in self.stored_layers for number in pair if number is not None)
        return max(numbers, default=self.num_layers - 1) + 1

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of an MLP."""
        return self.num_experts > 0 and self.has_mlp(layer) and layer not in self.dense_layers

    @property
    def expert_width(self) -> int:
        """Number of inputs and of outputs of an expert."""
        return self.expert_latent_size or self.hidden_size

    def mlp_size(self, layer: int) -> int:
        """Return the width of a layer's MLP, or of each of its experts."""
        return self.dense_intermediate_size if layer in self.dense_layers else self.intermediate_size

    def has_pre_norms(self, layer: int) -> bool:
        """Return whether the inputs of a layer's attention and MLP are normalised."""
        return self.pre_norms or (self.state_pre_norms and self.has_state(layer))

    def has_post_norms(self, layer: int) -> bool:
        """Return whether the outputs of a layer's attention and MLP are normalised."""
        return self.post_norms and not (self.state_pre_norms and self.has_state(layer))

    def has_state(self, layer: int) -> bool:
        """Return whether a layer has a state instead of keys and values."""
        return self.state_layers[layer] if self.state_layers else False


@dataclass(frozen=True)
class Precision:
    """Precision in which a model computes.

    Attributes:
        dtype: dtype of the hidden states between operators.
        activation_bits: precision of the inputs of products with quantised weights.
        logits_activation_bits: the same for the product that computes the logits. Its errors are errors of the logits,
            and its time is that of reading the weight, so 16 bits cost little. With 8 bits it caused a third of the
            divergence from fp32 on SmolLM2.
        kv_cache_dtype: dtype of the cached keys and values.
    """

    dtype: torch.dtype
    activation_bits: int
    logits_activation_bits: int
    kv_cache_dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether neither weights nor activations may be rounded."""
        return self.dtype == torch.float32 and self.activation_bits == 32

    @classmethod
    def of(cls, dtype: str, device: str = "cpu") -> "Precision":
        """Choose the precision for a user's ``dtype``.

        On a CPU, ``"float32"`` computes everything in fp32. ``"auto"`` has fp32 hidden states, whose cost is negligible
        compared with the weights, and integer products. ``"bfloat16"`` and ``"float16"`` have integer products with
        hidden states of that dtype. The KV cache of ``"auto"`` is fp16, which has three more bits of mantissa than bf16
        at the same speed.

        On a GPU, hidden states and KV cache are fp16 for ``"float16"``, else bf16; inputs of products are not
        quantised.

        Raises:
            RequestError: ``dtype`` is ``"float32"`` on a GPU.
        """
        if device != "cpu":
            if dtype == "float32":
                raise RequestError(f"dtype must be auto, bfloat16 or float16 on device {device!r}, got 'float32'")
            half = torch.float16 if dtype == "float16" else torch.bfloat16
            return cls(half, 32, 32, half)
        if dtype == "float32":
            return cls(torch.float32, 32, 32, torch.float32)
        if dtype == "auto":
            return cls(torch.float32, 8, 16, torch.float16)
        half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        return cls(half, 8, 16, half)
