"""Reader of AWQ linear layers, as AutoAWQ and GPTQModel pack them for their GEMM kernel.

``w[o, i] = scales[g, o] * (q[i, o] - zero[g, o])`` with the group g of input i, 4 bits. ``qweight`` [in, out / 8] and
``qzeros`` [groups, out / 8] pack eight outputs per word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up
(https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py). Method: Lin et al., 2023,
https://arxiv.org/abs/2306.00978.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.linear_tensors import DENSE_DTYPES, LinearTensors
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantization_settings import one_of, refuse_dynamic, setting
from fastinfer.formats.unpacked import Dense, Int4, Int8
from fastinfer.formats.zero_points import with_zero_points


@dataclass(frozen=True)
class AWQFormat:
    """Packing of a checkpoint's layers.

    Attributes:
        group_size: number of inputs per scale, -1 for all.
    """

    group_size: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "AWQFormat":
        """Parse a ``quantization_config``.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        one_of(config, "bits", (4,), 4)
        key = "version" if config.get("version") else "format"
        one_of(config, key, ("gemm",), "gemm")
        refuse_dynamic(config)
        if not setting(config, "zero_point", bool, True):
            raise UnsupportedModelError("quantization_config: zero_point False is not implemented for AWQ")
        return cls(setting(config, "group_size", int))

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Dense:
        """Read a layer's weight, Int4, or Dense for a layer that is not quantised.

        Arguments and errors are those of :meth:`fastinfer.formats.gptq.GPTQFormat.read`.
        """
        if layer.has("weight") and not layer.has("qweight"):
            return layer.dense()
        words = layer.take("qweight", torch.int32, (None, None))
        in_features, columns = words.shape
        group_size = layer.group_size(self.group_size, in_features)
        groups = in_features // group_size
        scales = layer.take("scales", DENSE_DTYPES, (groups, 8 * columns))
        zero_words = layer.take("qzeros", torch.int32, (groups, columns))
        return with_zero_points(_by_output(words), scales.t().contiguous(), _by_output(zero_words), 4, None, exact)


def _by_output(words: Tensor) -> Tensor:
    """Unpack [n, out / 8] int32 to [out, n] uint8.

    Place 4a + b of a word holds output 2b + a: a matrix of two rows and four columns, read by columns.
    """
    values = unpack_integers(words, 4).view(*words.shape, 2, 4)
    return values.permute(1, 3, 2, 0).reshape(8 * words.shape[1], words.shape[0])
