"""The layers for multi-token prediction in a Hugging Face folder.

DeepSeek and GLM have them behind the model's own layers, each with the norms and the projection of its input. Qwen has
one under ``mtp``. Copies of the embedding and the output layer are not read: the model's are the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.checkpoint import split_name
from fastinfer.models.config import ModelConfig
from fastinfer.models.families import Family
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.mtp_config import mtp_config, no_mtp_layer

APPENDED = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
UNDER_MTP = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
_APPENDED_NAMES = {"token_norm": "enorm", "feature_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
_MTP_NAMES = {
    "token_norm": "mtp.pre_fc_norm_embedding",
    "feature_norm": "mtp.pre_fc_norm_hidden",
    "fc": "mtp.fc",
    "norm": "mtp.norm",
}
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


class HFMTPCheckpoint(HFCheckpoint):
    """The layers for multi-token prediction in an open folder.

    Args:
        path, exact: see :class:`HFCheckpoint`.
        max_layers: number of layers to read at most, from the first one on; ``None`` for all.

    Raises:
        CheckpointFormatError: as for :class:`HFCheckpoint`.
        UnsupportedModelError: as for :class:`HFCheckpoint`, or such layers are not implemented for the architecture.
        RequestError: the folder has no such layer.
    """

    def __init__(self, path: Path, exact: bool = False, max_layers: int | None = None) -> None:
        self._max_layers = max_layers
        super().__init__(path, exact)

    def _read_config(self) -> tuple[ModelConfig, Family]:
        config, family = super()._read_config()
        name, first = config.architecture, config.num_layers
        if name in APPENDED:
            count = self._fields.get("num_nextn_predict_layers", int, 1, minimum=0) or 1
            layers = range(first, first + min(count, self._max_layers or count))
            return mtp_config(config, layers), replace(family, layer={**family.layer, **_APPENDED_NAMES})
        if name in UNDER_MTP:
            top = _MTP_NAMES | {"layers": "mtp.layers"}
            family = replace(family, prefix="", top=top, layer={**family.layer, **_MTP_NAMES})
            return mtp_config(config, range(1)), family
        raise UnsupportedModelError(
            f"{self.path}: layers for multi-token prediction are not implemented for {name}; "
            f"supported are {', '.join(APPENDED + UNDER_MTP)}"
        )

    def stored_name(self, name: str, *, is_single: bool = False) -> str:
        if self.config.architecture in UNDER_MTP and name.startswith("layers."):
            part = split_name(name)[1]
            name = part if part in _MTP_NAMES else name
        return super().stored_name(name, is_single=is_single)

    def _find_prefixes(self) -> tuple[str, str]:
        if self.config.architecture in APPENDED:
            return super()._find_prefixes()
        names = self.tensors.names
        candidates = ("", "model.", "language_model.", "model.language_model.")
        prefix = next((p for p in candidates if any(name.startswith(f"{p}mtp.") for name in names)), "")
        return prefix, prefix

    def _loaded_names(self) -> Iterator[str]:
        layers = self._family.top["layers"]
        own = [f"{layers}.{stored}." for stored, _ in self.config.stored_layers]
        if self.config.architecture in UNDER_MTP:
            own = ["mtp."]
        prefixes = tuple(map(self._with_prefix, own))
        return (name for name in self.tensors.names if name.startswith(prefixes) and not name.endswith(_COPIES))

    def _check_output_layer(self) -> None:
        if f"{self.stored_name('layers.0.feature_norm')}.weight" not in self.tensors:
            raise no_mtp_layer(self.path)
