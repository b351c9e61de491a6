"""Folders with a DFlash head, as its authors and speculators write them.

The authors have the layers' configuration at the top of config.json and the rest as ``dflash_config``, some of it at
the top, too; speculators has the configuration as ``transformer_layer_config`` and the rest at the top. A head with
``selector_rank`` is one of DFlash2, whose codebooks are parameters without ``.weight``. DeepSpec's heads of DSpark have
everything at the top. Formats: https://github.com/z-lab/dflash, https://github.com/vllm-project/speculators and
https://github.com/deepseek-ai/DeepSpec.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.unpacked import Dense
from fastinfer.models.config import MAX_SIZE, BlockConfig, ModelConfig
from fastinfer.models.families import FAMILIES, Family
from fastinfer.models.head_checks import check_block, check_layer_ids
from fastinfer.models.hf_fields import require
from fastinfer.models.hf_heads import MAX_POSITION, HFDraftCheckpoint, hf_head_kind
from fastinfer.models.hf_states import FULL, SLIDING

# Kinds of heads that are read here, see :func:`fastinfer.models.hf_heads.hf_head_kind`.
BLOCK_KINDS = ("dflash", "dflash2", "dspark")
# Names of what DFlash2 adds.
CONV_PARTS = {
    f"{name}{part}": f"{name}.{stored}"
    for name in ("attention_conv", "mlp_conv")
    for part, stored in (("", "kernel_projection"), ("_base", "base_kernel"))
}
SELECTOR_PARTS = {
    "selector_hidden": "candidate_selector.hidden_projection",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
}
# Names of what DSpark adds; its estimate of how many drafts are right (confidence_head) is not read.
MARKOV_PARTS = {name: f"markov_head.{name}" for name in ("markov_w1", "markov_w2")}


class HFDFlashCheckpoint(HFDraftCheckpoint):
    """An open folder with a DFlash head; arguments and errors are those of :class:`HFCheckpoint`."""

    def _read_config(self) -> tuple[ModelConfig, Family]:
        fields = self._fields
        layer = fields.object("transformer_layer_config")
        own = fields if layer is not None else self._own_fields()
        self._kind = hf_head_kind(self.path)
        for key, expected in (
            ("projector_type", "dspark" if self._kind == "dspark" else "dflash"),
            ("draft_ffn_type", "dense"),
            ("is_neox_style", True),
        ):
            require(own, key, expected)
        softcap = own.values.get("final_logit_softcapping")
        draft_vocab_size = fields.get("draft_vocab_size", int, None)
        config = self._layers_config("qwen3", draft_vocab_size, final_logit_softcapping=softcap)
        config = replace(
            config,
            draft_vocab_size=0 if draft_vocab_size == config.vocab_size else config.draft_vocab_size,
            windows=self._windows(fields if layer is None else layer, own, config),
            attention_sinks=own.get("attention_sink_bias", bool, own.get("add_swa_attention_sink_bias", bool, False)),
            embedding_scale=own.get("input_embedding_scale", float, 1.0, minimum=1e-6),
            logits_scale=own.get("output_multiplier", float, 1.0, minimum=1e-6),
        )
        block = self._block(own, config, is_own=layer is None)
        family = FAMILIES[config.architecture]
        top = {"embedding": "embed_tokens", "norm": "norm", "lm_head": "lm_head", "layers": "layers"}
        top |= SELECTOR_PARTS | MARKOV_PARTS
        names = {**family.layer, **CONV_PARTS, "sinks": "self_attn.attention_sink_bias"}
        return replace(config, block=block), replace(family, prefix="", top=top, layer=names)

    def conv_base(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read the own kernels of convolutions, fp32; errors are those of :meth:`vector`."""
        stored = self.stored_name(name)
        values = self._get(stored)
        if values.shape != shape:
            raise CheckpointFormatError(
                f"{self.path}: tensor {stored!r} must have the shape {list(shape)}, got {list(values.shape)}"
            )
        return values.float()

    def _dense(self, module: str) -> Dense:
        is_parameter = f"{module}.weight" not in self.tensors and module in self.tensors
        return Dense(self._get(module)) if is_parameter else super()._dense(module)

    def _own_fields(self) -> JsonFields:
        """Return the fields of DFlash's authors, of which those in ``dflash_config`` come first."""
        inner = self._fields.object("dflash_config")
        values = self._fields.values | ({} if inner is None else inner.values)
        return JsonFields(self._fields.path, values, CheckpointFormatError)

    def _windows(self, source: JsonFields, own: JsonFields, config: ModelConfig) -> tuple[int, ...]:
        """Return the length of each layer's window; ``layer_types`` counts where the layers' class would ignore it."""
        kinds: list[Any] = source.get("layer_types", list, [])
        if any(kind not in (FULL, SLIDING) for kind in kinds):
            raise UnsupportedModelError(
                f"{source.path}: layer_types must be {FULL} and {SLIDING} alone, got {kinds!r:.80}"
            )
        if self._uses_swa(own):
            kinds = [SLIDING] * config.num_layers
        if SLIDING not in kinds:
            return config.windows
        if len(kinds) != config.num_layers:
            raise CheckpointFormatError(
                f"{source.path}: layer_types: expected {config.num_layers} entries, got {len(kinds)}"
            )
        # Without a window these layers see the whole text, but still none of the tokens after them.
        is_used = self._uses_swa(own) or source.get("use_sliding_window", bool, True)
        key = "sliding_window" if own.values.get("swa_window_size") is None else "swa_window_size"
        place = source if key == "sliding_window" else own
        window = place.get(key, int, minimum=1, maximum=MAX_SIZE) if is_used else MAX_POSITION
        return tuple(window if kind == SLIDING else 0 for kind in kinds)

    def _uses_swa(self, own: JsonFields) -> bool:
        """Return whether all layers have a window, whatever ``layer_types`` says, as in heads for MiMo."""
        return bool(own.get("use_swa", bool, False)) and SLIDING not in (own.values.get("layer_types") or [])

    def _sees_whole_block(self, own: JsonFields, *, is_own: bool) -> bool | None:
        """Return whether a block's tokens see those after them in all layers, in none, or in some (``None``).

        If in some, those with a window hide them.
        """
        if not is_own:
            return True if own.get("sliding_window_non_causal", bool, True) else None
        key = "causal" if own.values.get("is_causal") is None else "is_causal"
        is_causal: bool | None = own.get(key, bool, None)
        if is_causal is None:
            return True if self._uses_swa(own) else None
        return not is_causal

    def _block(self, own: JsonFields, config: ModelConfig, *, is_own: bool) -> BlockConfig:
        """Read what the head was trained for; ``is_own``: in the format of DFlash's authors."""
        name = "target_layer_ids" if is_own else "aux_hidden_state_layer_ids"
        layers: list[Any] = own.get(name, list)
        check_layer_ids(name, layers, own.path, CheckpointFormatError)
        sees_whole_block = self._sees_whole_block(own, is_own=is_own)
        block = BlockConfig(
            # speculators counts the layers whose inputs are read.
            feature_layers=tuple(layer if is_own else layer - 1 for layer in layers),
            mask_token=own.get("mask_token_id", int, minimum=0, maximum=config.vocab_size - 1),
            size=own.get("block_size", int, minimum=2),
            drafts_next=own.get("sample_from_anchor", bool, False),
            is_causal=sees_whole_block is False,
            has_whole_windows=sees_whole_block is True,
        )
        if self._kind == "dflash2" or own.values.get("selector_rank") is not None:
            block = replace(
                block,
                conv_taps=own.get("conv_kernel_size", int, minimum=1, maximum=MAX_SIZE),
                conv_group_size=own.get("conv_group_size", int, minimum=1, maximum=MAX_SIZE),
                selector_rank=own.get("selector_rank", int, minimum=1, maximum=MAX_SIZE),
                selector_top_k=own.get("selector_top_k", int, minimum=1, maximum=config.vocab_size),
            )
        if self._kind == "dspark":
            require(own, "markov_head_type", "vanilla")
            require(own, "logit_scale", 1.0)
            block = replace(
                block,
                drafts_next=own.get("sample_from_anchor", bool, is_own),
                markov_rank=own.get("markov_rank", int, minimum=0, maximum=MAX_SIZE),
            )
        check_block(block, config, own.path)
        return block
