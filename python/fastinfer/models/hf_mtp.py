"""The layer for multi-token prediction in a Hugging Face folder.

DeepSeek and GLM have it behind the model's own layers, with the norms and the projection of its input. Qwen has it
under ``mtp``. Copies of the embedding and the output layer are not read: the model's are the same.
"""

from collections.abc import Iterator
from dataclasses import replace

from fastinfer.errors import UnsupportedModelError
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
    "layers": "mtp.layers",
}
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


class HFMTPCheckpoint(HFCheckpoint):
    """The layer for multi-token prediction in an open folder.

    Arguments and errors are those of :class:`HFCheckpoint`, and:

    Raises:
        UnsupportedModelError: the layer is not implemented for the architecture.
        RequestError: the folder has no such layer.
    """

    def _read_config(self) -> tuple[ModelConfig, Family]:
        config, family = super()._read_config()
        name = config.architecture
        if name in APPENDED:
            layers = family.top["layers"]
            top = {part: f"{layers}.{config.num_layers}.{stored}" for part, stored in _APPENDED_NAMES.items()}
            return mtp_config(config, config.num_layers), replace(family, top=top | {"layers": layers})
        if name in UNDER_MTP:
            return mtp_config(config, 0), replace(family, prefix="", top=_MTP_NAMES)
        raise UnsupportedModelError(
            f"{self.path}: layers for multi-token prediction are not implemented for {name}; "
            f"supported are {', '.join(APPENDED + UNDER_MTP)}"
        )

    def _find_prefixes(self) -> tuple[str, str]:
        if self.config.architecture in APPENDED:
            return super()._find_prefixes()
        names = self.tensors.names
        candidates = ("", "model.", "language_model.", "model.language_model.")
        prefix = next((p for p in candidates if any(name.startswith(f"{p}mtp.") for name in names)), "")
        return prefix, prefix

    def _loaded_names(self) -> Iterator[str]:
        [(stored, _)] = self.config.stored_layers
        own = "mtp." if self.config.architecture in UNDER_MTP else f"{self._family.top['layers']}.{stored}."
        prefix = self._with_prefix(own)
        return (name for name in self.tensors.names if name.startswith(prefix) and not name.endswith(_COPIES))

    def _check_output_layer(self) -> None:
        if f"{self.stored_name('feature_norm')}.weight" not in self.tensors:
            raise no_mtp_layer(self.path)
