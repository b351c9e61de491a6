"""Folders with a DFlash head, as its authors and speculators write them.

The authors have the layers' configuration at the top of config.json and the rest as ``dflash_config``; speculators has
the configuration as ``transformer_layer_config`` and the rest at the top. Formats: https://github.com/z-lab/dflash and
https://github.com/vllm-project/speculators.
"""

from dataclasses import replace
from typing import Any

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.config import BlockConfig, ModelConfig
from fastinfer.models.families import FAMILIES, Family
from fastinfer.models.hf_heads import HFDraftCheckpoint


class HFDFlashCheckpoint(HFDraftCheckpoint):
    """An open folder with a DFlash head; arguments and errors are those of :class:`HFCheckpoint`."""

    def _read_config(self) -> tuple[ModelConfig, Family]:
        fields = self._fields
        layer = fields.object("transformer_layer_config")
        kinds: list[Any] = (fields if layer is None else layer).get("layer_types", list, [])
        if any(kind != "full_attention" for kind in kinds):
            raise UnsupportedModelError(f"{fields.path}: layer_types must be full_attention alone, got {kinds!r:.80}")
        for key, expected in (("sample_from_anchor", False), ("projector_type", "dflash")):
            if fields.values.get(key, expected) != expected:
                raise UnsupportedModelError(
                    f"{fields.path}: {key} must be {expected!r}, got {fields.values[key]!r:.80}"
                )
        config = self._layers_config("qwen3", fields.get("draft_vocab_size", int, None))
        if any(config.windows):
            raise UnsupportedModelError(
                f"{fields.path}: expected layers without sliding windows, got windows of {config.windows}"
            )
        if config.draft_vocab_size == config.vocab_size:
            config = replace(config, draft_vocab_size=0)
        family = FAMILIES[config.architecture]
        top = {"embedding": "embed_tokens", "norm": "norm", "lm_head": "lm_head", "layers": "layers"}
        block = self._block(config.vocab_size, is_own=layer is None)
        return replace(config, block=block), replace(family, prefix="", top=top)

    def _block(self, vocab_size: int, *, is_own: bool) -> BlockConfig:
        """Read what the head was trained for; ``is_own``: in the format of DFlash's authors."""
        fields = self._fields
        own = fields.object("dflash_config") if is_own else None
        source = fields if own is None else own
        name = "target_layer_ids" if is_own else "aux_hidden_state_layer_ids"
        layers: list[Any] = source.get(name, list)
        self._check_layer_ids(name, layers)
        size: int = fields.get("block_size", int, minimum=2)
        # speculators counts the layers whose inputs are read.
        outputs = tuple(layer if is_own else layer - 1 for layer in layers)
        return BlockConfig(outputs, source.get("mask_token_id", int, minimum=0, maximum=vocab_size - 1), size)
