"""GGUF files with an EAGLE-3 head, as llama.cpp's converter writes them (architecture ``eagle3``).

The layer is that of a Llama, and has the norm of the features as ``attn_norm_2``. Keys and names:
https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFType
from fastinfer.models.checkpoint import check_draft_tokens
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_heads import MAX_POSITION, EagleSettings

EAGLE3 = "eagle3"
D2T = "d2t"


class GGUFHeadCheckpoint(GGUFCheckpoint):
    """An open GGUF file with an EAGLE-3 head; arguments and errors are those of :class:`GGUFCheckpoint`.

    Attributes:
        eagle: settings of the head.
    """

    def __init__(self, file: GGUFFile, exact: bool = False) -> None:
        super().__init__(file, exact)
        if self.config.num_layers != 1:
            raise UnsupportedModelError(f"{file.path}: block_count must be 1, got {self.config.num_layers}")
        wide, hidden = file.get(f"{EAGLE3}.target_hidden_size", int), self.config.hidden_size
        if wide != hidden:
            raise UnsupportedModelError(
                f"{file.path}: target_hidden_size must be the hidden size of {hidden}, got {wide}"
            )
        layers = file.get(f"{EAGLE3}.extract_layers", np.ndarray).tolist()
        if not layers or sorted(set(layers)) != layers or not all(isinstance(layer, int) for layer in layers):
            raise GGUFFormatError(f"{file.path}: extract_layers must be ascending numbers, got {layers!r:.80}")
        self.eagle = EagleSettings(tuple(layers), norm_residual=file.get(f"{EAGLE3}.norm_before_residual", bool, False))
        tokens = file.tensors.get(D2T)
        self.config = replace(
            self.config,
            max_position=MAX_POSITION,
            draft_vocab_size=0 if tokens is None else tokens.shape[0],
            has_features=True,
        )

    def draft_tokens(self) -> Tensor | None:
        tensor = self.file.tensors.get(D2T)
        if tensor is None:
            return None
        if tensor.type is not GGUFType.I64 or len(tensor.shape) != 1:
            got = f"{tensor.type.name} {tensor.shape}"
            raise GGUFFormatError(f"{self.path}: tensor {D2T!r} must be I64 with one dimension, got {got}")
        tokens = torch.from_numpy(tensor.data.reshape(-1).view("<i8").copy())
        check_draft_tokens(tokens, self.config.vocab_size, f"{self.path}: tensor {D2T!r}", GGUFFormatError)
        return tokens
