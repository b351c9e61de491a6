"""Layout of bitsandbytes' NF4 as transformers saves it.

:mod:`fastinfer.formats.bitsandbytes` reads and describes it.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.bitsandbytes import STATE
from fastinfer.formats.unpacked import Lut, Unpacked
from fastinfer.quantize.layout import WriterSettings, cannot_hold
from fastinfer.quantize.rounding import NF4_TABLE

GROUP_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


class BitsAndBytesLayout:
    """NF4 with fp32 scales.

    Args:
        settings: quantisation with 4 bits and one of ``GROUP_SIZES``.
        dtype: dtype in which transformers is to compute.

    Raises:
        QuantizationError: the layout cannot hold other settings.
    """

    leaves_out = True

    def __init__(self, settings: WriterSettings, dtype: torch.dtype) -> None:
        if settings.bits != 4:
            raise QuantizationError(f"bits: expected 4 for bitsandbytes, got {settings.bits}")
        if settings.group_size not in GROUP_SIZES:
            raise QuantizationError(
                f"group_size: expected one of {GROUP_SIZES} for bitsandbytes, got {settings.group_size}"
            )
        self._settings = settings
        self._dtype = str(dtype).removeprefix("torch.")

    def tensors(self, weight: Unpacked) -> dict[str, Tensor]:
        if not isinstance(weight, Lut) or weight.table is None or not torch.equal(weight.table, NF4_TABLE):
            raise cannot_hold("bitsandbytes", weight)
        if weight.permutation is not None:
            raise QuantizationError("expected inputs in the model's order, got a permutation")
        self._settings.check_groups(weight)
        pairs = weight.q.view(-1, 2)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": self._settings.group_size,
            "dtype": self._dtype,
            "shape": list(weight.shape),
        }
        tensors = {
            "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
            "weight.quant_map": NF4_TABLE.clone(),  # safetensors refuses tensors that share memory
            "weight.absmax": weight.scales.float().flatten(),
        }
        tensors[STATE + "nf4"] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors

    def config(self, left_out: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": self._dtype,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_use_double_quant": False,
            "llm_int8_skip_modules": list(left_out),
        }
