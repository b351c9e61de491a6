"""GGUF files with a draft head, as llama.cpp's converter writes them (architectures ``eagle3`` and ``dflash``).

The layer of an EAGLE-3 head is that of a Llama, and has the norm of the features as ``attn_norm_2``. The layers of a
DFlash head are those of Qwen3. Keys and names: https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp
and dflash.cpp beside it.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFType
from fastinfer.models.checkpoint import check_draft_tokens
from fastinfer.models.config import BlockConfig
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_fields import windows_by_layer
from fastinfer.models.hf_heads import MAX_POSITION, EagleSettings

EAGLE3, DFLASH = "eagle3", "dflash"
D2T = "d2t"
# Parts of heads that came after DFlash and have its architecture.
LATER_PARTS = ("markov_w1.weight", "selector_hidden.weight", "blk.0.attn_sinks.weight")


class GGUFDraftCheckpoint(GGUFCheckpoint):
    """An open GGUF file with a draft head; arguments and errors are those of :class:`GGUFCheckpoint`."""

    def __init__(self, file: GGUFFile, exact: bool = False) -> None:
        super().__init__(file, exact)
        tokens = file.tensors.get(D2T)
        draft_vocab_size = 0 if tokens is None else tokens.shape[0]
        self.config = replace(self.config, max_position=MAX_POSITION, draft_vocab_size=draft_vocab_size)

    def _layer_ids(self, key: str) -> tuple[int, ...]:
        """Return the numbers of the model's layers whose inputs the head reads."""
        layers = self.file.get(f"{self.config.architecture}.{key}", np.ndarray).tolist()
        if not layers or sorted(set(layers)) != layers or not all(isinstance(layer, int) for layer in layers):
            raise GGUFFormatError(f"{self.path}: {key} must be ascending numbers, got {layers!r:.80}")
        return tuple(layers)

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


class GGUFHeadCheckpoint(GGUFDraftCheckpoint):
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
        norm_residual = file.get(f"{EAGLE3}.norm_before_residual", bool, False)
        self.eagle = EagleSettings(self._layer_ids("extract_layers"), norm_residual=norm_residual)
        self.config = replace(self.config, has_features=True)


class GGUFDFlashCheckpoint(GGUFDraftCheckpoint):
    """An open GGUF file with a DFlash head; arguments and errors are those of :class:`GGUFCheckpoint`."""

    def __init__(self, file: GGUFFile, exact: bool = False) -> None:
        super().__init__(file, exact)
        if found := [name for name in LATER_PARTS if name in file.tensors]:
            raise UnsupportedModelError(f"{file.path}: tensor {found[0]!r} is not supported for {DFLASH}")
        block = BlockConfig(
            feature_layers=tuple(layer - 1 for layer in self._layer_ids("target_layers")),
            mask_token=file.get("tokenizer.ggml.mask_token_id", int, minimum=0, maximum=self.config.vocab_size - 1),
            size=file.get(f"{DFLASH}.block_size", int, 16, minimum=2),
        )
        windows = windows_by_layer(file, DFLASH) if self.config.windows else ()
        self.config = replace(self.config, block=block, windows=windows)
