"""Layout of GPTQ's tools; :mod:`fastinfer.formats.gptq` reads and describes it.

Symmetric checkpoints are written in the first format, ``gptq``, which every reader knows. It stores zero points minus
one, and readers interpret a zero point of 0 differently, so GPTQModel refuses asymmetric checkpoints in it. Those are
written in the second format, ``gptq_v2``, which stores zero points unchanged
(https://github.com/vllm-project/vllm/pull/26092).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.packed_integers import pack_integers
from fastinfer.formats.unpacked import Int4, Int8, Unpacked
from fastinfer.quantize.layout import WriterSettings, cannot_hold
from fastinfer.quantize.levels import Levels

BITS = (2, 3, 4, 8)
# Zero points of so many rows fill whole words.
ROWS = {2: 16, 3: 32, 4: 8, 8: 8}


class GPTQLayout:
    """Integers of 2, 3, 4 or 8 bits with fp16 scales.

    Args:
        settings: quantisation with one of ``BITS`` and without ``int8_activations``.

    Raises:
        QuantizationError: the layout cannot hold other settings.
    """

    leaves_out = False  # vLLM reads a list of dense layers, transformers does not

    def __init__(self, settings: WriterSettings) -> None:
        if settings.bits not in BITS:
            raise QuantizationError(f"bits: expected one of {BITS} for gptq, got {settings.bits}")
        if settings.int8_activations:
            raise QuantizationError("int8_activations: not supported by gptq; use compressed-tensors")
        self._settings = settings
        self._stored_zero = -1 if settings.symmetric else 0

    def tensors(self, weight: Unpacked) -> dict[str, Tensor]:
        settings = self._settings
        if not isinstance(weight, Int8 if settings.bits == 8 else Int4):
            raise cannot_hold("gptq", weight)
        settings.check_groups(weight)
        rows, columns = weight.shape
        if rows % (multiple := ROWS[settings.bits]):
            raise QuantizationError(f"expected a multiple of {multiple} outputs for gptq, got {rows}")
        levels = Levels.of(weight, settings.bits, settings.symmetric)
        zeros = levels.zeros.t() + self._stored_zero
        group_size = columns // levels.scales.shape[1]
        return {
            "qweight": pack_integers(levels.q, settings.bits).t(),
            "qzeros": pack_integers(zeros, settings.bits),
            "scales": levels.scales.t(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // group_size,
        }

    def config(self, left_out: Sequence[str]) -> dict[str, Any]:
        settings = self._settings
        return {
            "quant_method": "gptq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "desc_act": False,
            "sym": settings.symmetric,
            "lm_head": False,
            "pack_dtype": "int32",
            "checkpoint_format": "gptq" if settings.symmetric else "gptq_v2",
        }
