"""Construction of draft heads from checkpoints."""

from dataclasses import replace
from typing import Any

from fastinfer.models.attention_loader import load_attention
from fastinfer.models.block_conv import BlockConv, ConvolvedLayer
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import BlockConfig, Precision
from fastinfer.models.decoder import DecoderLayer
from fastinfer.models.dflash_head import DFlashHead
from fastinfer.models.draft_chain import CandidateSelector, DraftChain, MarkovBias
from fastinfer.models.draft_head import DraftHead
from fastinfer.models.eagle_head import EagleHead
from fastinfer.models.gguf_heads import GGUFDFlashCheckpoint, GGUFHeadCheckpoint
from fastinfer.models.gguf_mtp import GGUFMTPCheckpoint
from fastinfer.models.hf_dflash import HFDFlashCheckpoint
from fastinfer.models.hf_heads import HFHeadCheckpoint
from fastinfer.models.hf_mtp import HFMTPCheckpoint
from fastinfer.models.layer_reader import LayerReader, Part
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.mlp import GatedMLP
from fastinfer.models.mlp_loader import load_mlp
from fastinfer.models.mtp_head import MTPEnds, MTPHead
from fastinfer.models.norm import NoNorm, RMSNorm, factor_norm
from fastinfer.models.position_tables import PositionTables


class EagleReader(LayerReader):
    """Reader of an EAGLE-3 layer, whose attention reads two hidden states beside each other."""

    def read(self, sizes: dict[str, int], has_bias: bool) -> list[Part]:
        linear, width = self.checkpoint.linear, 2 * self.config.hidden_size
        return [
            (name, linear(name, size, width), self.vector(f"{name}.bias", size) if has_bias else None)
            for name, size in sizes.items()
        ]


def own_vocabulary(reader: LayerReader) -> dict[str, Any]:
    """Read the embedding, the output layer and its tokens, as attributes of a head; ``None`` for what it lacks."""
    checkpoint, config = reader.checkpoint, reader.config
    sizes = {"embedding": config.vocab_size, "lm_head": config.draft_vocab_size or config.vocab_size}
    weights = {name: reader.vocabulary(name, size) if name in checkpoint else None for name, size in sizes.items()}
    tokens = checkpoint.draft_tokens()
    return {**weights, "draft_tokens": None if tokens is None else tokens.to(reader.device)}


def load_eagle_head(
    checkpoint: HFHeadCheckpoint | GGUFHeadCheckpoint, precision: Precision, max_model_len: int | None, device: str
) -> EagleHead:
    """Read an EAGLE-3 head; arguments and errors are those of :func:`fastinfer.models.loader.load_decoder`."""
    reader, config, settings = EagleReader(checkpoint, precision, device), checkpoint.config, checkpoint.eagle
    hidden = config.hidden_size
    tables = PositionTables.of(checkpoint, config.table_length(max_model_len), device)
    attention = load_attention(reader, tables, 0)
    assert isinstance(attention.norm, RMSNorm)
    count = 3 if settings.aux_layers is None else len(settings.aux_layers)
    fc = reader.weight(("fc",), checkpoint.linear("fc", hidden, count * hidden), None)
    norm = reader.norm("norm")
    assert isinstance(norm, RMSNorm)

    def input_norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(reader.vector(name, size), config.norm_eps)

    return EagleHead(
        config=config,
        dtype=precision.dtype,
        exact=precision.exact,
        layers=(DecoderLayer(replace(attention, norm=NoNorm()), load_mlp(reader, 0), shares_input=True),),
        norm=norm,
        token_norm=attention.norm,
        feature_norm=input_norm("layers.0.feature_norm", hidden),
        norm_output=settings.norm_output,
        aux_layers=settings.aux_layers,
        fc=fc,
        fc_norm=input_norm("input_norm", count * hidden) if settings.has_fc_norm else None,
        aux_norms=tuple(input_norm(f"fc_norm.{i}", hidden) for i in range(count)) if settings.has_aux_norms else (),
        norm_residual=settings.norm_residual,
        **own_vocabulary(reader),
    )


def load_dflash_head(
    checkpoint: HFDFlashCheckpoint | GGUFDFlashCheckpoint, precision: Precision, max_model_len: int | None, device: str
) -> DFlashHead:
    """Read a DFlash head; arguments and errors are those of :func:`fastinfer.models.loader.load_decoder`."""
    reader, config = LayerReader(checkpoint, precision, device), checkpoint.config
    assert config.block is not None
    hidden, count, scale = config.hidden_size, len(config.block.feature_layers), config.embedding_scale
    tables = PositionTables.of(checkpoint, config.table_length(max_model_len), device)

    def conv(name: str) -> BlockConv:
        assert config.block is not None
        taps, size = config.block.conv_taps, config.block.conv_group_size
        base = checkpoint.conv_base(f"{name}_base", (2, taps, hidden)).unflatten(2, (-1, size)).to(device)
        rows = 2 * taps * (hidden // size)
        return BlockConv(base, reader.weight((name,), checkpoint.linear(name, rows, hidden), None))

    def layer(index: int) -> DecoderLayer:
        attention, mlp = load_attention(reader, tables, index, is_split=True), load_mlp(reader, index)
        assert config.block is not None
        if not config.block.conv_taps:
            return DecoderLayer(attention, mlp)
        assert isinstance(mlp, GatedMLP)
        assert isinstance(attention.norm, RMSNorm)
        assert isinstance(mlp.norm, RMSNorm)
        return ConvolvedLayer(
            attention=replace(attention, norm=NoNorm()),
            mlp=replace(mlp, norm=NoNorm()),
            attention_norm=attention.norm,
            mlp_norm=mlp.norm,
            attention_conv=conv(f"layers.{index}.attention_conv"),
            mlp_conv=conv(f"layers.{index}.mlp_conv"),
        )

    return DFlashHead(
        config=config,
        dtype=precision.dtype,
        exact=precision.exact,
        layers=tuple(map(layer, range(config.num_layers))),
        norm=reader.norm("norm", config.logits_scale),
        embedding_norm=None if scale == 1.0 else factor_norm(scale, hidden, device),
        fc=reader.weight(("fc",), checkpoint.linear("fc", hidden, count * hidden), None),
        feature_norm=RMSNorm(reader.vector("hidden_norm", hidden), config.norm_eps),
        chain=load_chain(reader, config.block),
        **own_vocabulary(reader),
    )


def load_chain(reader: LayerReader, block: BlockConfig) -> DraftChain | None:
    """Read what makes a draft depend on the one before it; ``None`` for a head without."""
    config = reader.config
    if rank := block.markov_rank:
        size = config.draft_vocab_size or config.vocab_size
        return MarkovBias(
            embedding=reader.vocabulary("markov_w1", config.vocab_size, rank),
            projection=reader.vocabulary("markov_w2", size, rank),
        )
    if not (rank := block.selector_rank):
        return None
    hidden = reader.checkpoint.linear("selector_hidden", rank, config.hidden_size)
    return CandidateSelector(
        projection=reader.weight(("selector_hidden",), hidden, None),
        predecessors=reader.vocabulary("selector_predecessor", config.vocab_size, rank),
        successors=reader.vocabulary("selector_successor", config.vocab_size, rank),
        top_k=block.selector_top_k,
    )


def with_vocabulary(
    head: DraftHead, checkpoint: Checkpoint, precision: Precision, max_model_len: int | None, device: str
) -> DraftHead:
    """Return a head with its own copies of the embedding and the output layer that it would share with its model.

    A rank needs them that drafts alone for a model that is divided: the model's own are computed by all ranks together.

    Args:
        head: the head.
        checkpoint: an open checkpoint of the model.
        precision, max_model_len, device: see :func:`fastinfer.models.loader.load_decoder`.
    """
    loader = DecoderLoader(LayerReader(checkpoint, precision, device), max_model_len)
    embedding, lm_head = head.embedding, head.lm_head
    if embedding is None:
        embedding = loader.embedding()
    if lm_head is None:
        is_shared = "lm_head" not in checkpoint and head.embedding is None
        lm_head = embedding if is_shared else loader.lm_head() or loader.embedding()
    checkpoint.release()
    return replace(head, embedding=embedding, lm_head=lm_head)


def load_mtp_head(
    checkpoint: HFMTPCheckpoint | GGUFMTPCheckpoint, precision: Precision, max_model_len: int | None, device: str
) -> MTPHead:
    """Read layers for multi-token prediction.

    Arguments and errors are those of :func:`fastinfer.models.loader.load_decoder`.
    """
    reader, config = LayerReader(checkpoint, precision, device), checkpoint.config
    hidden = config.hidden_size

    def ends(layer: int) -> MTPEnds:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(reader.vector(f"layers.{layer}.{name}", hidden), config.norm_eps)

        fc = f"layers.{layer}.fc"
        return MTPEnds(
            token_norm=norm("token_norm"),
            feature_norm=norm("feature_norm"),
            fc=reader.weight((fc,), checkpoint.linear(fc, hidden, 2 * hidden), None),
            norm=norm("norm"),
        )

    indices = range(config.num_layers)
    return MTPHead(
        config=config,
        dtype=precision.dtype,
        exact=precision.exact,
        embedding=None,
        layers=DecoderLoader(reader, max_model_len).layers(indices),
        norm=NoNorm(),
        lm_head=None,
        ends=tuple(map(ends, indices)),
    )
