"""Construction of a decoder from a checkpoint.

Matrices with the same input become one weight: Q, K and V are concatenated, gate and up are interleaved. Each kind of
layer part is read in a file of its own, ``*_loader.py``.
"""

import torch
from torch import Tensor
from tqdm import tqdm

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.models.attention import Attention
from fastinfer.models.attention_loader import load_attention
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.expert_loader import check_experts
from fastinfer.models.latent_attention import LatentAttention
from fastinfer.models.latent_loader import load_latent_attention
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.linear_attention import LinearAttention
from fastinfer.models.mamba2 import Mamba2
from fastinfer.models.mlp_loader import load_mlp
from fastinfer.models.norm import Norm, RMSNorm, factor_norm
from fastinfer.models.per_layer_input import PerLayerInputs
from fastinfer.models.per_layer_loader import load_per_layer_gate, load_per_layer_inputs
from fastinfer.models.position_tables import PositionTables
from fastinfer.models.short_conv import ShortConv
from fastinfer.models.state_loader import load_state_layer
from fastinfer.weights.weight import Weight

# Longest rotary table: 256 MiB at a head size of 64.
MAX_POSITIONS = 2**20
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
        UnsupportedModelError: the form of a tensor is not implemented, or a GGUF file's layer has a tensor that nothing
            reads, without which the text would be wrong.
        GGUFFormatError, CheckpointFormatError: a tensor is missing or does not have the shape that follows from the
            metadata.
    """
    return DecoderLoader(LayerReader(checkpoint, precision, device), max_model_len).decoder()


class DecoderLoader:
    """Builder of one decoder, from what a reader gives it.

    Args:
        reader: reader of the parts of layers.
        max_model_len: number of positions in the rotary table; ``None`` for the model's own limit.
    """

    def __init__(self, reader: LayerReader, max_model_len: int | None) -> None:
        self._reader = reader
        self._config = config = reader.config
        positions = config.table_length(max_model_len)
        path = reader.checkpoint.path
        if positions > MAX_POSITIONS:
            raise RequestError(f"max_model_len must be at most {MAX_POSITIONS}, got {positions} from {path}")
        check_experts(reader.checkpoint)
        self._tables = PositionTables.of(reader.checkpoint, positions, reader.device)

    def decoder(self) -> Decoder:
        """Read all weights and build the decoder."""
        embedding = self.embedding()
        head = self.lm_head()
        checkpoint = self._reader.checkpoint
        draft_tokens = checkpoint.draft_tokens()
        decoder = Decoder(
            config=self._config,
            dtype=self._reader.precision.dtype,
            exact=self._reader.precision.exact,
            embedding=embedding,
            layers=self.layers(range(self._config.num_layers)),
            norm=self.norm(),
            lm_head=embedding if head is None else head,
            embedding_norm=self.embedding_norm(),
            position_embedding=self.position_embedding(),
            draft_tokens=None if draft_tokens is None else draft_tokens.to(self._reader.device),
            per_layer_inputs=self.per_layer_inputs(),
        )
        if unread := checkpoint.unread():
            architecture = self._config.architecture
            raise UnsupportedModelError(f"{checkpoint.path}: tensor {unread[0]!r} is not supported for {architecture}")
        return decoder

    def embedding(self) -> Weight:
        """Read the embedding."""
        return self._reader.vocabulary("embedding", self._config.vocab_size)

    def embedding_norm(self) -> RMSNorm | None:
        """Make the norm of the rows of the embedding, or their factor; None for neither."""
        config = self._config
        if config.normed_embedding:
            ones = torch.ones(config.hidden_size, dtype=torch.float32, device=self._reader.device)
            return RMSNorm(ones, config.norm_eps)
        factor = config.embedding_scale / self._reader.scale
        if factor == 1.0 or config.layer_scales:
            return None
        return factor_norm(factor, config.hidden_size, self._reader.device)

    def lm_head(self) -> Weight | None:
        """Read the output layer; None if it is the embedding."""
        config = self._config
        if not config.draft_vocab_size and "lm_head" not in self._reader.checkpoint:
            return None
        return self._reader.vocabulary("lm_head", config.draft_vocab_size or config.vocab_size)

    def position_embedding(self) -> Tensor | None:
        """Read the learned positions; None for a model with rotary positions."""
        config = self._config
        if config.rotary_dim:
            return None
        table = self._reader.checkpoint.linear("position_embedding", config.max_position, config.hidden_size)
        # A copy, or the file could stay mapped.
        return table.dequantize().to(self._reader.device, self._reader.precision.dtype, copy=True)

    def per_layer_inputs(self, layers: range | None = None) -> PerLayerInputs | None:
        """Read what makes the inputs of layers, by default of all; None for a model whose layers have none."""
        return load_per_layer_inputs(self._reader, layers or range(self._config.num_layers))

    def norm(self) -> Norm:
        """Read the norm after the last layer. It scales the logits, too."""
        return self._reader.norm("norm", self._config.logits_scale)

    def layers(self, indices: range) -> tuple[DecoderLayer, ...]:
        """Read layers, with a progress bar on a terminal."""
        checkpoint, layers = self._reader.checkpoint, []
        with tqdm(
            total=len(indices),
            desc=f"loading {checkpoint.path.name}",
            unit="layer",
            leave=False,
            delay=PROGRESS_DELAY,
            disable=None,  # unless stderr is a terminal
        ) as progress:
            for index in indices:
                layers.append(self.layer(index))
                checkpoint.release()  # otherwise the file and its packed copy would be in memory at the same time
                progress.update()
        return tuple(layers)

    def layer(self, index: int) -> DecoderLayer:
        """Read one layer."""
        config, reader = self._config, self._reader
        return DecoderLayer(
            self._attention(index),
            load_mlp(reader, index),
            config.parallel,
            load_per_layer_gate(reader, index),
            shares_input=config.is_parallel(index),
        )

    def _attention(self, index: int) -> Attention | LatentAttention | LinearAttention | Mamba2 | ShortConv:
        """Read the attention of a layer, or what it has in its place."""
        config, reader = self._config, self._reader
        if config.has_state(index):
            return load_state_layer(reader, index)
        if config.latent_attention is not None:
            return load_latent_attention(reader, self._tables, index, config.latent_attention)
        return load_attention(reader, self._tables, index)
