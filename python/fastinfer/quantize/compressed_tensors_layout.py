"""Layout of LLM Compressor and vLLM.

:mod:`fastinfer.formats.compressed_tensors` reads and describes it. transformers 5.23 loads asymmetric checkpoints,
including those of the compressed-tensors library itself, only with ``CompressedTensorsConfig(dequantize=True)``.
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

INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class CompressedTensorsLayout:
    """Packed integers of 4 or 8 bits with fp16 scales (W4A16, W8A16), or int8 with an fp32 scale per row (W8A8).

    In W8A8 the inputs are rounded per token, and ``group_size`` and ``symmetric`` are ignored.

    Args:
        settings: quantisation with 4 or 8 bits.

    Raises:
        QuantizationError: the layout cannot hold other settings.
    """

    leaves_out = True

    def __init__(self, settings: WriterSettings) -> None:
        if settings.bits not in (4, 8):
            raise QuantizationError(
                f"bits: expected 4 or 8 for compressed-tensors, got {settings.bits}; the format gptq has 2 and 3"
            )
        if settings.int8_activations and settings.bits != 8:
            raise QuantizationError(f"bits: expected 8 with int8_activations, got {settings.bits}")
        self._settings = settings

    def tensors(self, weight: Unpacked) -> dict[str, Tensor]:
        settings = self._settings
        if isinstance(weight, Int8) and weight.int8_activations and settings.int8_activations:
            return _plain(weight)
        form = Int8 if settings.bits == 8 else Int4
        if not isinstance(weight, form) or settings.int8_activations or getattr(weight, "int8_activations", False):
            raise cannot_hold("compressed-tensors", weight)
        settings.check_groups(weight)
        levels = Levels.of(weight, settings.bits, settings.symmetric)
        tensors = {
            "weight_packed": pack_integers(levels.q, settings.bits),
            "weight_scale": levels.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not settings.symmetric:
            # Zero points are packed along the outputs; the rest of the last word is filled with zeros.
            rows, _ = weight.shape
            words = pack_integers(torch.nn.functional.pad(levels.zeros.t(), (0, -rows % 8)), settings.bits)
            tensors["weight_zero_point"] = words[:, : -(-rows * settings.bits // 32)].t()
        return tensors

    def config(self, left_out: Sequence[str]) -> dict[str, Any]:
        settings = self._settings
        weights: dict[str, Any] = {
            "num_bits": settings.bits,
            "type": "int",
            "symmetric": settings.symmetric or settings.int8_activations,
            "dynamic": False,
        }
        if settings.group_size == -1 or settings.int8_activations:
            weights |= {"strategy": "channel"}
        else:
            weights |= {"strategy": "group", "group_size": settings.group_size}
        format = "int-quantized" if settings.int8_activations else "pack-quantized"
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": INT8_TOKENS if settings.int8_activations else None,
            "output_activations": None,
            "format": format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left_out),
        }


def _plain(weight: Int8) -> dict[str, Tensor]:
    rows, _ = weight.shape
    if weight.mins is not None or weight.permutation is not None or weight.scales.shape != (rows, 1):
        given = [name for name in ("mins", "permutation") if getattr(weight, name) is not None]
        raise QuantizationError(
            "expected one scale per row, no minimums and no permutation with int8_activations, "
            f"got {' and '.join([f'scales {list(weight.scales.shape)}', *given])} for {rows} rows"
        )
    return {"weight": weight.q, "weight_scale": weight.scales.float()}
