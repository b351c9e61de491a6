"""Folders with a DFlash head, as its authors and speculators write them.

The authors have the layers' configuration at the top of config.json and the rest as ``dflash_config``, some of it at
the top, too; speculators has the configuration as ``transformer_layer_config`` and the rest at the top. Formats:
https://github.com/z-lab/dflash and https://github.com/vllm-project/speculators.
"""

from dataclasses import replace
from typing import Any

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, BlockConfig, ModelConfig
from fastinfer.models.families import FAMILIES, Family
from fastinfer.models.hf_fields import require
from fastinfer.models.hf_heads import MAX_POSITION, HFDraftCheckpoint
from fastinfer.models.hf_states import FULL, SLIDING


class HFDFlashCheckpoint(HFDraftCheckpoint):
    """An open folder with a DFlash head; arguments and errors are those of :class:`HFCheckpoint`."""

    def _read_config(self) -> tuple[ModelConfig, Family]:
        fields = self._fields
        layer = fields.object("transformer_layer_config")
        own = fields if layer is not None else self._own_fields()
        for key, expected in (
            ("sample_from_anchor", False),
            ("projector_type", "dflash"),
            ("use_swa", False),  # a window in which a block's tokens see those behind them
            ("attention_sink_bias", False),
            ("is_neox_style", True),
        ):
            require(own, key, expected)
        softcap = own.values.get("final_logit_softcapping")
        draft_vocab_size = fields.get("draft_vocab_size", int, None)
        config = self._layers_config("qwen3", draft_vocab_size, final_logit_softcapping=softcap)
        config = replace(
            config,
            draft_vocab_size=0 if draft_vocab_size == config.vocab_size else config.draft_vocab_size,
            windows=self._windows(fields if layer is None else layer, config),
            embedding_scale=own.get("input_embedding_scale", float, 1.0, minimum=1e-6),
            logits_scale=own.get("output_multiplier", float, 1.0, minimum=1e-6),
        )
        is_causal = self._is_causal(own, config, is_own=layer is None)
        block = self._block(own, config.vocab_size, is_causal, is_own=layer is None)
        family = FAMILIES[config.architecture]
        top = {"embedding": "embed_tokens", "norm": "norm", "lm_head": "lm_head", "layers": "layers"}
        return replace(config, block=block), replace(family, prefix="", top=top)

    def _own_fields(self) -> JsonFields:
        """Return the fields of DFlash's authors, of which those in ``dflash_config`` come first."""
        inner = self._fields.object("dflash_config")
        values = self._fields.values | ({} if inner is None else inner.values)
        return JsonFields(self._fields.path, values, CheckpointFormatError)

    def _windows(self, source: JsonFields, config: ModelConfig) -> tuple[int, ...]:
        """Return the length of each layer's window; ``layer_types`` counts where the layers' class would ignore it."""
        kinds: list[Any] = source.get("layer_types", list, [])
        if any(kind not in (FULL, SLIDING) for kind in kinds):
            raise UnsupportedModelError(
                f"{source.path}: layer_types must be {FULL} and {SLIDING} alone, got {kinds!r:.80}"
            )
        if SLIDING not in kinds:
            return config.windows
        if len(kinds) != config.num_layers:
            raise CheckpointFormatError(
                f"{source.path}: layer_types: expected {config.num_layers} entries, got {len(kinds)}"
            )
        # Without a window these layers see the whole text, but still none of the tokens behind them.
        is_used = source.get("use_sliding_window", bool, True)
        window = source.get("sliding_window", int, minimum=1, maximum=MAX_SIZE) if is_used else MAX_POSITION
        return tuple(window if kind == SLIDING else 0 for kind in kinds)

    def _is_causal(self, own: JsonFields, config: ModelConfig, *, is_own: bool) -> bool:
        """Return whether a block's tokens see none of those behind them in layers without a window, too."""
        if is_own:
            key = "causal" if own.values.get("is_causal") is None else "is_causal"
            causal = own.get(key, bool, None)  # by default in layers with a window alone
            hides, expected = causal is not False, True
        else:
            key, causal, expected = "sliding_window_non_causal", None, False
            hides = not own.get(key, bool, True)
        if any(config.windows) and not hides:
            raise UnsupportedModelError(
                f"{own.path}: {key} must be {expected} for layers with sliding windows, got {not expected}"
            )
        return bool(causal)

    def _block(self, own: JsonFields, vocab_size: int, is_causal: bool, *, is_own: bool) -> BlockConfig:
        """Read what the head was trained for; ``is_own``: in the format of DFlash's authors."""
        name = "target_layer_ids" if is_own else "aux_hidden_state_layer_ids"
        layers: list[Any] = own.get(name, list)
        self._check_layer_ids(name, layers)
        size: int = own.get("block_size", int, minimum=2)
        # speculators counts the layers whose inputs are read.
        outputs = tuple(layer if is_own else layer - 1 for layer in layers)
        mask = own.get("mask_token_id", int, minimum=0, maximum=vocab_size - 1)
        return BlockConfig(outputs, mask, size, is_causal)
