"""The layout of GPTQ's tools; :mod:`fastinfer.formats.gptq` reads it and says what is where.

Symmetric checkpoints are written in the first format, ``gptq``, which every reader knows. It stores a zero point less
one, and readers differ in what they make of a zero point of 0, so GPTQModel refuses asymmetric checkpoints in it.
Those are written in the second, ``gptq_v2``, which stores zero points as they are
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
# 32 integers of any of these widths fill whole words.
ROWS = 32


class GPTQLayout:
    """Integers of 2, 3, 4 or 8 bits with fp16 scales.

    Raises:
        QuantizationError: other settings.
    """

    leaves_out = False  # vLLM could be told, transformers not

    def __init__(self, settings: WriterSettings) -> None:
        if settings.bits not in BITS:
            raise QuantizationError(f"bits: expected one of {BITS} for gptq, got {settings.bits}")
        if settings.int8_activations:
            raise QuantizationError("int8_activations: gptq cannot say so; use compressed-tensors")
        self._settings = settings
        self._stored_zero = -1 if settings.symmetric else 0

    def tensors(self, weight: Unpacked) -> dict[str, Tensor]:
        settings = self._settings
        if not isinstance(weight, Int8 if settings.bits == 8 else Int4):
            raise cannot_hold("gptq", weight)
        settings.check_groups(weight)
        rows, columns = weight.shape
        if rows % ROWS:
            raise QuantizationError(f"expected a multiple of {ROWS} outputs for gptq, got {rows}")
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
