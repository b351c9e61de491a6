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
NESTED_SIZE = 256  # number of scales that share a scale of their own


class BitsAndBytesLayout:
    """NF4 with fp32 scales or, with double quantisation, 8-bit scales.

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
        if self._settings.double_quantization:
            nested, offset = _nest(tensors["weight.absmax"])
            tensors |= nested
            state |= {"nested_blocksize": NESTED_SIZE, "nested_dtype": "float32", "nested_offset": offset}
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
            "bnb_4bit_use_double_quant": self._settings.double_quantization,
            "llm_int8_skip_modules": list(left_out),
        }


def _nest(scales: Tensor) -> tuple[dict[str, Tensor], float]:
    """Quantise scales to 8 bits: indices into a table, relative to the largest value of each run of 256.

    Returns:
        The tensors, and the mean of the scales, which is subtracted first.
    """
    table, offset = dynamic_table(), float(scales.mean())
    rest = scales - offset
    runs = torch.nn.functional.pad(rest, (0, -len(rest) % NESTED_SIZE)).view(-1, NESTED_SIZE)
    largest = runs.abs().amax(1)
    relative = runs / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    places = torch.bucketize(relative, (table[1:] + table[:-1]) / 2).byte().flatten()[: len(rest)]
    return {"weight.absmax": places, "weight.nested_absmax": largest, "weight.nested_quant_map": table}, offset


def dynamic_table() -> Tensor:
    """Return the 256 values of the dynamic data type (Dettmers, 2015, https://arxiv.org/abs/1511.04561) in order.

    They are the midpoints of 2^k equal parts of 0.1 .. 1 times 10^(k - 6) for k = 0 .. 6, their negatives, 0 and 1.
    """
    positive = []
    for k in range(7):
        edges = torch.linspace(0.1, 1, 2**k + 1, dtype=torch.float64)
        positive.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (k - 6))
    values = torch.cat(positive)
    return torch.cat([-values, values, torch.tensor([0.0, 1.0])]).sort().values.float()
