"""Reader of GPTQ linear layers, as AutoGPTQ and GPTQModel pack them.

``w[o, i] = scales[g, o] * (q[i, o] - zero[g, o])`` with the group g of input i. The ``pack`` methods of these
tools write this layout (https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear): ``qweight``
[in * bits / 32, out] packs inputs, ``qzeros`` [groups, out * bits / 32] packs outputs, ``g_idx`` [in] is the group of
each input. The format ``gptq`` stores each zero minus one, ``gptq_v2`` stores the zero itself. Method: Frantar et al.,
2022, https://arxiv.org/abs/2210.17323.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.formats.linear_tensors import DENSE_DTYPES, LinearTensors
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantization_settings import one_of, refuse, refuse_dynamic, setting
from fastinfer.formats.unpacked import Dense, Int4, Int8
from fastinfer.formats.zero_points import with_zero_points


@dataclass(frozen=True)
class GPTQFormat:
    """Packing of a checkpoint's layers.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: number of inputs per scale, -1 for all.
        act_order: whether the inputs of a group may be scattered (``desc_act``).
        stored_zero: stored value of a zero point of 0: -1 in the format ``gptq``, 0 in ``gptq_v2``.
    """

    bits: int
    group_size: int
    act_order: bool
    stored_zero: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "GPTQFormat":
        """Parse a ``quantization_config``.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        refuse(config, "is_marlin_format", "rotation", "adapter")
        refuse_dynamic(config)
        one_of(config, "pack_dtype", ("int32",), "int32")
        key = "checkpoint_format" if config.get("checkpoint_format") else "format"
        return cls(
            bits=one_of(config, "bits", (2, 3, 4, 8)),
            group_size=setting(config, "group_size", int),
            act_order=setting(config, "desc_act", bool, False),
            stored_zero=-1 if one_of(config, key, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0,
        )

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Dense:
        """Read a layer's weight: Int4 for 2, 3 and 4 bits, Int8 for 8 bits, Dense for a layer that is not quantised.

        Args:
            layer: tensors of the layer.
            exact: see :func:`fastinfer.formats.zero_points.with_zero_points`.

        Raises:
            CheckpointFormatError: a tensor is missing or does not have the shape and type of its format.
            UnsupportedModelError: the kernels do not support the group size.
        """
        if layer.has("weight") and not layer.has("qweight"):
            return layer.dense()
        words = layer.take("qweight", torch.int32, (None, None))
        in_features, out_features = words.shape[0] * 32 // self.bits, words.shape[1]
        if words.shape[0] % self.bits:
            layer.fail("qweight", f"expected a multiple of {self.bits} rows, got {words.shape[0]}")
        if out_features * self.bits % 32:
            layer.fail(
                "qweight", f"expected columns that fill words of 32 bits, got {out_features} of {self.bits} bits"
            )
        group_size = layer.group_size(min(self.group_size, in_features), in_features)
        groups = in_features // group_size
        scales = layer.take("scales", DENSE_DTYPES, (groups, out_features))
        zero_words = layer.take("qzeros", torch.int32, (groups, out_features * self.bits // 32))
        permutation = None
        if self.act_order or layer.has("g_idx"):
            permutation = layer.group_order("g_idx", group_size, in_features)

        q = unpack_integers(words.t().contiguous(), self.bits)
        if permutation is not None:
            q = q[:, permutation]
        # The format gptq stores a zero of 0 as all ones; adding one wraps around within the bits.
        zeros = (unpack_integers(zero_words, self.bits) - self.stored_zero) & (2**self.bits - 1)
        return with_zero_points(q, scales.t().contiguous(), zeros.t().contiguous(), self.bits, permutation, exact)
