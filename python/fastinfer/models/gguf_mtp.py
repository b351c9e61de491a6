"""The layers for multi-token prediction in a GGUF file: ``nextn`` in the names of its tensors.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py. Copies of the embedding and the
output layer are not read: the model's are the same.
"""

from collections.abc import Iterator

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.checkpoint import split_name
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.mtp_config import mtp_config, no_mtp_layer

ARCHITECTURES_WITH_MTP = ("deepseek2", "glm4moe", "qwen3next", "qwen35", "qwen35moe")
_NAMES = {"token_norm": "enorm", "feature_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head_norm"}
_COPIES = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")


class GGUFMTPCheckpoint(GGUFCheckpoint):
    """The layers for multi-token prediction in an open file.

    Args:
        file, exact: see :class:`GGUFCheckpoint`.
        max_layers: number of layers to read at most, from the first one on; ``None`` for all.

    Raises:
        GGUFFormatError: as for :class:`GGUFCheckpoint`.
        UnsupportedModelError: as for :class:`GGUFCheckpoint`, or such layers are not implemented for the architecture.
        RequestError: the file has no such layer.
    """

    def __init__(self, file: GGUFFile, exact: bool = False, max_layers: int | None = None) -> None:
        super().__init__(file, exact)
        name, first = self.config.architecture, self.config.num_layers
        count = file.get(f"{name}.nextn_predict_layers", int, 0, minimum=0)
        if not count:
            raise no_mtp_layer(self.path)
        if name not in ARCHITECTURES_WITH_MTP:
            raise UnsupportedModelError(
                f"{self.path}: layers for multi-token prediction are not implemented for {name}; "
                f"supported are {', '.join(ARCHITECTURES_WITH_MTP)}"
            )
        self.config = mtp_config(self.config, range(first, first + min(count, max_layers or count)))

    def _stored(self, name: str) -> str:
        if not name.startswith("layers."):
            return super()._stored(name)
        layer, part, _ = split_name(name)
        if part not in _NAMES:
            return super()._stored(name)
        stored = f"blk.{self.config.stored_layers[layer][0]}.nextn.{_NAMES[part]}"
        # A file may leave out the last norm if it is that of the model.
        is_shared = part == "norm" and f"{stored}.weight" not in self.file.tensors
        return super()._stored("norm") if is_shared else stored

    def _loaded_names(self) -> Iterator[str]:
        prefixes = tuple(f"blk.{stored}." for stored, _ in self.config.stored_layers)
        return (name for name in self.file.tensors if name.startswith(prefixes) and not name.endswith(_COPIES))
