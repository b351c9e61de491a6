"""Folders with an EAGLE-3 head, as speculators and SpecForge write them.

speculators has the layer's configuration as ``transformer_layer_config`` in config.json, and the layer as ``layers.0``;
SpecForge has the configuration at the top, and the layer as ``midlayer``. Formats:
https://github.com/vllm-project/speculators and https://github.com/sgl-project/SpecForge.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig
from fastinfer.models.families import FAMILIES, Family
from fastinfer.models.head_checks import check_layer_ids
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import parse_hf_config

SPECFORGE = "LlamaForCausalLMEagle3"
# Kinds of heads by the architecture that config.json names.
KINDS = {
    SPECFORGE: "eagle3",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",  # of DeepSpec
    "DSparkDraftModel": "dspark",  # of SpecForge
}
SPECULATORS_KEY = "speculators_model_type"
# Families of the layer by model_type.
LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# No position is learned, and the model's limit is what counts.
MAX_POSITION = 2**20


@dataclass(frozen=True)
class EagleSettings:
    """Settings of an EAGLE-3 head.

    Attributes:
        aux_layers, norm_residual, norm_output: see :class:`fastinfer.models.eagle_head.EagleHead`.
        has_fc_norm, has_aux_norms: whether the inputs are normalised together, or each by itself.
    """

    aux_layers: tuple[int, ...] | None = None
    norm_residual: bool = False
    norm_output: bool = False
    has_fc_norm: bool = False
    has_aux_norms: bool = False


def hf_head_kind(path: Path) -> str | None:
    """Return which kind of draft head a folder has, by speculators' names; ``None`` for none.

    Raises:
        CheckpointFormatError: config.json is missing or damaged.
    """
    values = JsonFields.read(path / "config.json", CheckpointFormatError).values
    if SPECULATORS_KEY in values:
        return str(values[SPECULATORS_KEY])
    return next((kind for name, kind in KINDS.items() if values.get("architectures") == [name]), None)


class HFDraftCheckpoint(HFCheckpoint):
    """An open folder with a draft head, whose layers are those of a family of models.

    Arguments and errors are those of :class:`HFCheckpoint`.
    """

    def _layers_config(self, default_type: str, draft_vocab_size: int | None, **others: Any) -> ModelConfig:
        """Read the configuration of the layers, from ``transformer_layer_config`` if there is one.

        Args:
            default_type: ``model_type`` where none is given.
            draft_vocab_size: number of tokens that the head can draft; ``None`` for all.
            others: fields to read instead of those in the file.
        """
        fields, layer = self._fields, self._fields.object("transformer_layer_config")
        source = fields if layer is None else layer
        name = source.get("model_type", str, default_type)
        if name not in LAYERS:
            raise UnsupportedModelError(f"{fields.path}: model_type must be one of {list(LAYERS)}, got {name!r:.80}")
        values = source.values | {"architectures": [LAYERS[name]], "tie_word_embeddings": None}
        values |= {"max_position_embeddings": MAX_POSITION, "draft_vocab_size": draft_vocab_size, **others}
        return parse_hf_config(JsonFields(fields.path, values, CheckpointFormatError))

    def _check_output_layer(self) -> None:
        """Refuse a head without an output layer, which is then the model's, if it can draft a part of the tokens."""
        size = self.config.draft_vocab_size
        if size not in (0, self.config.vocab_size) and "lm_head" not in self:
            raise CheckpointFormatError(
                f"{self.path}: tensor 'lm_head.weight' is missing, which draft_vocab_size={size} needs"
            )


class HFHeadCheckpoint(HFDraftCheckpoint):
    """An open folder with an EAGLE-3 head; arguments and errors are those of :class:`HFCheckpoint`."""

    eagle: EagleSettings

    def _read_config(self) -> tuple[ModelConfig, Family]:
        fields = self._fields
        layer, self._is_specforge = fields.object("transformer_layer_config"), SPECULATORS_KEY not in fields.values
        kind = "eagle3" if self._is_specforge else fields.get(SPECULATORS_KEY, str)
        if kind != "eagle3":
            raise UnsupportedModelError(
                f"{fields.path}: {SPECULATORS_KEY} must be 'eagle3', 'dflash', 'dflash2' or 'dspark', got {kind!r:.80}"
            )
        if layer is None and not self._is_specforge:
            raise CheckpointFormatError(f"{fields.path}: transformer_layer_config is missing")
        config = self._layers_config("llama", fields.get("draft_vocab_size", int, None))
        if config.num_layers != 1:
            raise UnsupportedModelError(f"{fields.path}: num_hidden_layers must be 1, got {config.num_layers}")
        wide = fields.get("target_hidden_size", int, config.hidden_size)
        if wide != config.hidden_size:
            raise UnsupportedModelError(
                f"{fields.path}: target_hidden_size must be the hidden size of {config.hidden_size}, got {wide}"
            )
        self.eagle = self._settings()
        family = FAMILIES[config.architecture]
        layers = "midlayer" if self._is_specforge else "layers"
        top = {"embedding": "embed_tokens", "norm": "norm", "lm_head": "lm_head", "layers": layers}
        names = {**family.layer, "feature_norm": "hidden_norm"}
        return replace(config, has_features=True), replace(family, prefix="", top=top, layer=names)

    def stored_name(self, name: str, *, is_single: bool = False) -> str:
        stored = super().stored_name(name, is_single=is_single)
        return stored.replace("midlayer.0.", "midlayer.") if self._is_specforge else stored

    def _settings(self) -> EagleSettings:
        fields = self._fields
        ids: list[Any] | None = fields.get("eagle_aux_hidden_state_layer_ids", list, None)
        eagle = fields.object("eagle_config")
        if ids is None and eagle is not None:
            outputs = eagle.get("eagle_aux_hidden_state_layer_ids", list, None)
            ids = outputs and [layer + 1 if isinstance(layer, int) else layer for layer in outputs]
        if ids is not None:
            check_layer_ids("eagle_aux_hidden_state_layer_ids", ids, fields.path, CheckpointFormatError)
        return EagleSettings(
            None if ids is None else tuple(ids),
            norm_residual=fields.get("norm_before_residual", bool, False),
            norm_output=fields.get("norm_output", bool, False),
            has_fc_norm=fields.get("norm_before_fc", bool, False),
            has_aux_norms=fields.get("fc_norm", bool, False),
        )
