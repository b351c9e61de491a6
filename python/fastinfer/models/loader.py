"""Construction of a decoder from a checkpoint.

Matrices with the same input become one weight: Q, K and V are concatenated, gate and up are interleaved.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from fastinfer import ops
from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.formats.unpacked import Unpacked, combine, concatenate
from fastinfer.models.attention import Attention
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.mlp import MLP, GatedMLP, PlainMLP
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.norm import LayerNorm, Norm, RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.ops.pack import TILE_ROWS, interleave_gate_up
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.expert_weights import make_expert_weights
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import ConcatenatedWeight, Weight

# Longest rotary table: 256 MiB at a head size of 64.
MAX_POSITIONS = 2**20
# Limits of fastinfer.ops.route_experts.
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN = 1024, 32
GATE_UP = ("gate_proj", "up_proj")
PROGRESS_DELAY = 2.0  # seconds before a progress bar appears


def load_decoder(
    checkpoint: Checkpoint, precision: Precision, max_model_len: int | None, device: str = "cpu"
) -> Decoder:
    """Read, check and pack all weights.

    Args:
        checkpoint: an open checkpoint.
        precision: precision in which the model computes.
        max_model_len: number of positions in the rotary table; ``None`` for the model's own limit.
        device: device of the weights.

    Raises:
        UnsupportedModelError: the form of a tensor is not implemented.
        GGUFFormatError, CheckpointFormatError: a tensor is missing or does not have the shape that follows from the
            metadata.
    """
    return DecoderLoader(checkpoint, precision, max_model_len, device).decoder()


class DecoderLoader:
    """Builder of one decoder; a subclass that needs other weights than the checkpoint's overrides :meth:`weight`."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision, max_model_len: int | None, device: str) -> None:
        self._checkpoint = checkpoint
        self._config = config = checkpoint.config
        self._precision = precision
        self._device = device
        self._memory = HugePages() if device == "cpu" else None
        # GPU products need dense weights in the dtype of the hidden states.
        self._dense_dtype = None if device == "cpu" else precision.dtype
        self._positions = min(max_model_len or config.max_position, config.max_position)
        if self._positions > MAX_POSITIONS:
            raise RequestError(
                f"max_model_len must be at most {MAX_POSITIONS}, got {self._positions} from {checkpoint.path}"
            )
        if config.num_experts > MAX_EXPERTS or config.experts_per_token > MAX_EXPERTS_PER_TOKEN:
            raise UnsupportedModelError(
                f"{checkpoint.path}: expected at most {MAX_EXPERTS} experts and {MAX_EXPERTS_PER_TOKEN} per token, "
                f"got {config.num_experts} and {config.experts_per_token}"
            )
        # The embedding is not multiplied by its scale s, so the residual stream is smaller by the factor s. RMSNorm
        # gives the same result with eps / s^2, and layers add less because their post-norm weights are divided by s.
        self._scale = config.embedding_scale
        self._rope, self._local_rope = self._cos_sin_caches(config)

    def decoder(self) -> Decoder:
        """Read all weights and build the decoder."""
        config, checkpoint = self._config, self._checkpoint
        layers = []
        with tqdm(
            total=config.num_layers,
            desc=f"loading {checkpoint.path.name}",
            unit="layer",
            leave=False,
            delay=PROGRESS_DELAY,
            disable=None,  # unless stderr is a terminal
        ) as progress:
            embedding = self.embedding()
            head = self.lm_head()
            draft_tokens = checkpoint.draft_tokens()
            for index in range(config.num_layers):
                layers.append(self.layer(index))
                checkpoint.release()  # otherwise the file and its packed copy would be in memory at the same time
                progress.update()
        return Decoder(
            config=config,
            dtype=self._precision.dtype,
            embedding=embedding,
            layers=tuple(layers),
            norm=self.norm(),
            lm_head=embedding if head is None else head,
            position_embedding=self.position_embedding(),
            draft_tokens=None if draft_tokens is None else draft_tokens.to(self._device),
        )

    def embedding(self) -> Weight:
        """Read the embedding."""
        return self._vocabulary("embedding", self._config.vocab_size)

    def lm_head(self) -> Weight | None:
        """Read the output layer; None if it is the embedding."""
        config = self._config
        if not config.draft_vocab_size and "lm_head" not in self._checkpoint:
            return None
        return self._vocabulary("lm_head", config.draft_vocab_size or config.vocab_size)

    def position_embedding(self) -> Tensor | None:
        """Read the learned positions; None for a model with rotary positions."""
        config = self._config
        if config.rotary_dim:
            return None
        table = self._checkpoint.linear("position_embedding", config.max_position, config.hidden_size)
        # A copy, or the file could stay mapped.
        return table.dequantize().to(self._device, self._precision.dtype, copy=True)

    def norm(self) -> Norm:
        """Read the norm after the last layer."""
        return self._norm("norm")

    def layer(self, index: int) -> DecoderLayer:
        """Read one layer."""
        return DecoderLayer(self._attention(index), self._mlp(index))

    def weight(self, names: tuple[str, ...], unpacked: Unpacked, bias: Tensor | None) -> Weight:
        """Pack a layer's weight.

        Args:
            names: matrices whose rows the weight contains, concatenated; gate and up are interleaved in runs of 16.
            unpacked: the weight, unpacked.
            bias: [out_features], with rows in the same order, or ``None``.
        """
        return self._make(unpacked, self._precision.activation_bits, bias)

    def _attention(self, index: int) -> Attention:
        config, layer = self._config, f"layers.{index}"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_norm = self._vector(f"{layer}.q_norm", config.head_dim) if config.qk_norm else None
        k_norm = self._vector(f"{layer}.k_norm", config.head_dim) if config.qk_norm else None
        window = config.window(index)
        return Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm=self._norm(f"{layer}.attention_norm"),
            qkv=self._concatenated(
                {f"{layer}.q_proj": q_size, f"{layer}.k_proj": kv_size, f"{layer}.v_proj": kv_size}, config.qkv_bias
            ),
            output=self._output(f"{layer}.o_proj", q_size, config.output_bias, f"{layer}.post_attention_norm"),
            cos_sin_cache=self._local_rope if window else self._rope,
            q_norm=q_norm,
            k_norm=k_norm,
            head_norm_eps=config.norm_eps,
            window=window,
            softcap=config.attention_softcap,
            scale=config.attention_scale,
        )

    def _mlp(self, index: int) -> MLP:
        config, layer = self._config, f"layers.{index}"
        inner = config.intermediate_size
        norm = self._norm(f"{layer}.mlp_norm")
        if config.num_experts:
            return self._mixture(layer, norm)
        down = self._output(f"{layer}.down_proj", inner, config.mlp_bias, f"{layer}.post_mlp_norm")
        if not config.gated:
            return PlainMLP(
                norm, self._concatenated({f"{layer}.up_proj": inner}, config.mlp_bias), down, config.activation
            )
        gate_up = self._gate_up(layer)
        bias = None
        if config.mlp_bias:
            bias = interleave_gate_up(*(self._vector(f"{layer}.{name}.bias", inner) for name in GATE_UP))
        names = tuple(f"{layer}.{name}" for name in GATE_UP)
        return GatedMLP(norm, self.weight(names, gate_up, bias), down, config.activation)

    def _gate_up(self, owner: str) -> Unpacked:
        """Read gate and up of a layer or an expert, and interleave their rows."""
        inner = self._config.intermediate_size
        gate, up = (self._checkpoint.linear(f"{owner}.{name}", inner, self._config.hidden_size) for name in GATE_UP)
        if not gate.fits(up) or inner % TILE_ROWS:
            raise UnsupportedModelError(
                f"{self._checkpoint.path}: {owner}: gate and up must have one form and a multiple of "
                f"{TILE_ROWS} rows, got {gate.kind} and {up.kind} with {inner}"
            )
        return _interleave(gate, up)

    def _mixture(self, layer: str, norm: Norm) -> MixtureOfExperts:
        config, checkpoint = self._config, self._checkpoint
        assert isinstance(norm, RMSNorm)
        experts = [f"{layer}.experts.{index}" for index in range(config.num_experts)]
        shape = config.hidden_size, config.intermediate_size
        packing = self._precision.activation_bits, self._device, self._dense_dtype
        # A small error could make the router choose another expert, so its input is not quantised.
        router = checkpoint.linear(f"{layer}.router", config.num_experts, config.hidden_size)
        return MixtureOfExperts(
            norm=norm,
            router=make_weight(router, 32, self._device, self._dense_dtype),
            gate_up=make_expert_weights([self._gate_up(expert) for expert in experts], *packing),
            down=make_expert_weights(
                [checkpoint.linear(f"{expert}.down_proj", *shape) for expert in experts], *packing
            ),
            top_k=config.experts_per_token,
            renormalize=config.renormalize_experts,
            activation=config.activation,
        )

    def _output(self, name: str, in_features: int, has_bias: bool, post_norm: str) -> OutputProjection:
        config = self._config
        weight = self._checkpoint.linear(name, config.hidden_size, in_features)
        bias = self._vector(f"{name}.bias", config.hidden_size) if has_bias else None
        norm = None
        if config.post_norms:
            norm = RMSNorm(self._vector(post_norm, config.hidden_size) / self._scale, config.norm_eps)
        module = name.rpartition(".")[2]
        return OutputProjection(module, self.weight((name,), weight, bias), norm)

    def _concatenated(self, sizes: dict[str, int], has_bias: bool) -> Weight:
        """Read matrices with the same input, and concatenate their rows or, if their forms differ, their outputs."""
        hidden, names = self._config.hidden_size, tuple(sizes)
        parts = [self._checkpoint.linear(name, size, hidden) for name, size in sizes.items()]
        biases = [self._vector(f"{name}.bias", size) for name, size in sizes.items() if has_bias]
        if all(parts[0].fits(part) for part in parts):
            return self.weight(names, concatenate(parts), torch.cat(biases) if biases else None)
        return ConcatenatedWeight(
            tuple(self.weight(names[i : i + 1], part, biases[i] if biases else None) for i, part in enumerate(parts))
        )

    def _vocabulary(self, name: str, rows: int) -> Weight:
        parts = self._checkpoint.parts(name, rows, self._config.hidden_size)
        return self._make(parts, self._precision.logits_activation_bits, rows=rows)

    def _norm(self, name: str) -> Norm:
        config = self._config
        weight = self._vector(name, config.hidden_size)
        if config.norm == "layer_norm":
            return LayerNorm(weight, self._vector(f"{name}.bias", config.hidden_size), config.norm_eps)
        return RMSNorm(weight, config.norm_eps / self._scale**2)

    def _vector(self, name: str, size: int) -> Tensor:
        return self._checkpoint.vector(name, size).to(self._device)

    def _make(
        self,
        unpacked: Unpacked | Iterable[Unpacked],
        activation_bits: int,
        bias: Tensor | None = None,
        rows: int | None = None,
    ) -> Weight:
        return make_weight(unpacked, activation_bits, self._device, self._dense_dtype, bias, self._memory, rows)

    def _cos_sin_caches(self, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Compute the rotary tables of the layers without and with a window, which are often the same."""
        if not config.rotary_dim:  # rotation by an angle of 0
            table = torch.tensor([[1.0, 0.0]]).repeat(self._positions, 1).to(self._device)
            return table, table
        factors = None
        if "rope_factors" in self._checkpoint:
            factors = self._checkpoint.vector("rope_factors", config.rotary_dim // 2)
        sizes = config.rotary_dim, self._positions
        try:
            table = ops.cos_sin_cache(*sizes, config.rope_theta, config.rope_scaling, factors).to(self._device)
        except (ValueError, ArithmeticError) as error:  # logarithms and quotients of a damaged file's numbers
            raise UnsupportedModelError(f"{self._checkpoint.path}: rotary scaling: {error}") from None
        if config.local_rope_theta is None:
            return table, table
        return table, ops.cos_sin_cache(*sizes, config.local_rope_theta).to(self._device)


def _interleave(gate: Unpacked, up: Unpacked) -> Unpacked:
    """Interleave the rows of gate and up in runs of 16."""
    return combine([gate, up], lambda rows: interleave_gate_up(*rows))
