"""GGUF files with a draft head, as llama.cpp's converter writes them (architectures ``eagle3`` and ``dflash``).

The layer of an EAGLE-3 head is that of a Llama, and has the norm of the features as ``attn_norm_2``. The layers of a
DFlash head are those of Qwen3. Heads of DFlash2 and DSpark have the same architecture, and further tensors. Keys and
names: https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp and dflash.cpp beside it.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFType
from fastinfer.formats.gguf_unpack import unpack_rows
from fastinfer.formats.unpacked import Dense
from fastinfer.models.checkpoint import check_draft_tokens
from fastinfer.models.config import MAX_SIZE, BlockConfig
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_fields import windows_by_layer
from fastinfer.models.head_checks import check_block, check_layer_ids
from fastinfer.models.hf_heads import MAX_POSITION, EagleSettings

EAGLE3, DFLASH = "eagle3", "dflash"
D2T = "d2t"
SELECTOR = "selector_hidden.weight"  # which heads of DFlash2 have
MARKOV = "markov_w1.weight"  # and heads of DSpark
SINKS = "blk.0.attn_sinks.weight"


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
        check_layer_ids(key, layers, self.path, GGUFFormatError)
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
        block = BlockConfig(
            feature_layers=tuple(layer - 1 for layer in self._layer_ids("target_layers")),
            mask_token=file.get("tokenizer.ggml.mask_token_id", int, minimum=0, maximum=self.config.vocab_size - 1),
            size=file.get(f"{DFLASH}.block_size", int, 16, minimum=2),
        )
        if SELECTOR in file.tensors:

            def size(key: str) -> int:
                return file.get(f"{DFLASH}.{key}", int, minimum=1, maximum=MAX_SIZE)

            block = replace(
                block,
                has_whole_windows=True,
                conv_taps=size("conv_kernel_size"),
                conv_group_size=size("conv_group_size"),
                selector_rank=size("selector_rank"),
                selector_top_k=min(size("selector_top_k"), self.config.vocab_size),
            )
        if MARKOV in file.tensors:
            block = replace(
                block,
                has_whole_windows=True,
                drafts_next=file.get(f"{DFLASH}.sample_from_anchor", bool, True),
                markov_rank=file.tensors[MARKOV].shape[-1],
            )
        windows = windows_by_layer(file, DFLASH) if self.config.windows else ()
        self.config = replace(self.config, block=block, windows=windows, attention_sinks=SINKS in file.tensors)
        check_block(block, self.config, file.path)

    def conv_base(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read the own kernels of convolutions, fp32; errors are those of :meth:`vector`."""
        stored = self._stored(name)
        tensor = self._get(stored)
        values = unpack_rows(tensor.data.reshape(1, -1), tensor.type, stored)
        if not isinstance(values, Dense) or tensor.shape != shape:
            got = f"{tensor.type.name} {tensor.shape}"
            raise GGUFFormatError(f"{self.path}: tensor {stored!r} must be dense with the shape {shape}, got {got}")
        return values.values.float().view(shape)
