"""Reader of linear layers in the compressed-tensors format (LLM Compressor, vLLM).

A ``quantization_config`` has groups of layers, each with a scheme. Six kinds of schemes are supported
(https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors):

- ``pack-quantized``: weights of 4 or 8 bits, inputs not quantised (W4A16, W8A16). ``weight_packed``
  [out, in * bits / 32] packs inputs; ``weight_scale`` is [out, groups]; ``weight_zero_point``
  [out * bits / 32, groups], if present, packs outputs. All integers are stored with 2**(bits - 1) added.
  ``weight_g_idx`` [in] is the group of each input.
- ``int-quantized``: weights of 8 bits, ``weight`` [out, in] int8 and ``weight_scale`` [out, 1] or [1]. The inputs are
  not quantised (W8A16), or quantised to int8 with a scale per token (W8A8).
- ``float-quantized``: weights in fp8, ``weight`` [out, in] e4m3 and ``weight_scale`` [out, 1], [1], or one for each
  block of ``block_structure``. See :mod:`fastinfer.formats.fp8`.
- ``nvfp4-pack-quantized``: weights in fp4, see :mod:`fastinfer.formats.nvfp4`; they are divided by
  ``weight_global_scale``.
- ``mxfp4-pack-quantized``, ``mxfp8-quantized``: weights in fp4 and fp8, see :mod:`fastinfer.formats.mxfp4` and
  :mod:`fastinfer.formats.mxfp8`.

Layers without ``weight_scale`` are not quantised, whatever the names of the schemes say: programs give the layers of a
model in a model other names. Inputs of weights in fp8 and fp4 are not rounded, whatever the scheme says of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.fp8 import E4M3, block_shape, read_fp8
from fastinfer.formats.linear_tensors import DENSE_DTYPES, LinearTensors
from fastinfer.formats.mxfp4 import MX_GROUP, read_mxfp4
from fastinfer.formats.mxfp8 import read_mxfp8
from fastinfer.formats.nvfp4 import NVFP4_GROUP, read_nvfp4
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantization_settings import compile_pattern, one_of, refuse, setting
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut
from fastinfer.formats.zero_points import kernel_scales, with_zero_points

PACKED = "pack-quantized"
PLAIN = "int-quantized"
FP8 = "float-quantized"
NVFP4 = "nvfp4-pack-quantized"
MXFP4 = "mxfp4-pack-quantized"
MXFP8 = "mxfp8-quantized"
NAIVE = "naive-quantized"  # int-quantized or float-quantized, by the type of the numbers

STRATEGIES = {
    PACKED: ("group", "channel", "tensor"),
    PLAIN: ("group", "channel", "tensor"),
    FP8: ("channel", "tensor", "block"),
    NVFP4: ("tensor_group",),
    MXFP4: ("group",),
    MXFP8: ("group",),
}
BITS = {PACKED: (4, 8), PLAIN: (8,), FP8: (8,), NVFP4: (4,), MXFP4: (4,), MXFP8: (8,)}
# Those of weights in floating point, with a fixed number of inputs per scale if it is not 0.
FLOATS = {FP8: 0, NVFP4: NVFP4_GROUP, MXFP4: MX_GROUP, MXFP8: MX_GROUP}


@dataclass(frozen=True)
class Scheme:
    """Format of the layers of one group.

    Attributes:
        targets: names of layers, ``re:`` followed by a regular expression, or names of classes.
        format: ``PACKED``, ``PLAIN``, ``FP8``, ``NVFP4``, ``MXFP4`` or ``MXFP8``.
        bits: 4 or 8.
        group_size: number of inputs per scale, -1 for all.
        per_tensor: whether the whole weight has one scale.
        block: rows and columns of a block of fp8 weights with the same scale; ``None`` for one scale per output.
        symmetric: whether there are no zero points.
        int8_activations: whether inputs are quantised to int8.
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    group_size: int
    per_tensor: bool
    block: tuple[int, int] | None
    symmetric: bool
    int8_activations: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any], default_format: str) -> "Scheme":
        """Parse one of the ``config_groups``; errors are those of :meth:`CompressedTensorsFormat.parse`."""
        weights = setting(config, "weights", dict)
        inputs: dict[str, Any] | None = setting(config, "input_activations", dict, None)
        refuse(config, "output_activations")
        format = one_of({"format": config.get("format") or default_format}, "format", (*STRATEGIES, NAIVE))
        if format == NAIVE:
            format = FP8 if weights.get("type") == "float" else PLAIN
        is_float = format in FLOATS
        one_of(weights, "type", ("float",) if is_float else ("int",), "int")
        refuse(weights, "dynamic")
        strategy = one_of(weights, "strategy", STRATEGIES[format], "channel")
        block = None
        if strategy == "block":
            block = block_shape(setting(weights, "block_structure", list), "block_structure")
        else:
            refuse(weights, "block_structure")
        if group_size := FLOATS.get(format):
            one_of(weights, "group_size", (group_size,))
        scheme = cls(
            targets=tuple(str(target) for target in setting(config, "targets", list)),
            format=format,
            bits=one_of(weights, "num_bits", BITS[format], 8),
            group_size=setting(weights, "group_size", int) if strategy == "group" else -1,
            per_tensor=strategy == "tensor",
            block=block,
            symmetric=setting(weights, "symmetric", bool, True),
            int8_activations=inputs is not None and not is_float,
        )
        if inputs is not None and not is_float:
            scheme._check_inputs(inputs)
        if not scheme.symmetric and (format != PACKED or strategy == "tensor"):
            raise UnsupportedModelError(
                f"quantization_config: asymmetric weights are not implemented for {format}, {strategy}"
            )
        return scheme

    def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Require what the W8A8 kernels support: int8 inputs with dynamic scales per token, one scale per output."""
        prefix = "quantization_config: input_activations: "
        if setting(inputs, "type", str, "int") != "int" or setting(inputs, "num_bits", int, 8) != 8:
            raise UnsupportedModelError(f"{prefix}only int8 is implemented, got {inputs!r:.90}")
        if inputs.get("dynamic") is not True or setting(inputs, "strategy", str, "token") != "token":
            raise UnsupportedModelError(f"{prefix}only dynamic scales by token are implemented, got {inputs!r:.90}")
        if not setting(inputs, "symmetric", bool, True):
            raise UnsupportedModelError(f"{prefix}asymmetric activations are not implemented")
        if self.format == PACKED or self.group_size != -1:
            raise UnsupportedModelError(f"{prefix}need int-quantized weights of 8 bits with one scale per output")


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """Format of a checkpoint's layers: the schemes, and the layers that are not quantised."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "CompressedTensorsFormat":
        """Parse a ``quantization_config``; its KV cache settings are ignored, because the engine chooses that dtype.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        if setting(config, "sparsity_config", dict, {}).get("format", "dense") != "dense":
            raise UnsupportedModelError("quantization_config: 'sparsity_config' is not implemented")
        refuse(setting(config, "transform_config", dict, {}), "config_groups")
        format = setting(config, "format", str)
        groups = setting(config, "config_groups", dict)
        schemes = [Scheme.parse(setting(groups, name, dict), format) for name in groups]
        ignore = [str(name) for name in setting(config, "ignore", list, [])]
        return cls(tuple(schemes), tuple(ignore))

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a linear layer, or ``None`` if it is not quantised; names go before classes."""
        if any(_matches(module, pattern) for pattern in self.ignore):
            return None
        for match in (_matches_name, _matches):
            for scheme in self.schemes:
                if any(match(module, target) for target in scheme.targets):
                    return scheme
        return None

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Lut | Dense:
        """Read a layer's weight: Int4, Int8, Lut, or Dense for a layer that is not quantised.

        Args:
            layer: tensors of the layer.
            exact: see :func:`fastinfer.formats.zero_points.with_zero_points` and
                :meth:`fastinfer.formats.fp8.FP8Format.read`.

        Raises:
            CheckpointFormatError: a tensor is missing or does not have the shape and type of its format.
            UnsupportedModelError: the kernels do not support the group size.
        """
        scheme = self.scheme(layer.module)
        if scheme is None or not (layer.has("weight_scale") or layer.has("weight_packed")):
            return layer.dense()
        if scheme.format == FP8:
            columns = layer.take("weight", E4M3, (None, None)).shape[1]
            per_output = None if scheme.per_tensor else (1, columns)
            return read_fp8(layer, "weight_scale", scheme.block or per_output, exact)
        if scheme.format == NVFP4:
            global_scale = layer.take_number("weight_global_scale", torch.float32)
            return read_nvfp4(layer, "weight_packed", 1 / global_scale, exact)
        if scheme.format == MXFP4:
            return read_mxfp4(layer, "weight_packed", "weight_scale")
        if scheme.format == MXFP8:
            return read_mxfp8(layer, exact)
        return _read_packed(layer, scheme, exact) if scheme.format == PACKED else _read_plain(layer, scheme, exact)


def _read_packed(layer: LinearTensors, scheme: Scheme, exact: bool) -> Int4 | Int8:
    words = layer.take("weight_packed", torch.int32, (None, None))
    rows, columns = layer.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    if list(words.shape) != [rows, columns * scheme.bits // 32] or columns * scheme.bits % 32:
        layer.fail(
            "weight_packed", f"expected {scheme.bits}-bit integers for {[rows, columns]}, got {list(words.shape)}"
        )
    group_size = layer.group_size(scheme.group_size, columns)
    groups = columns // group_size
    scales = layer.take("weight_scale", DENSE_DTYPES, (1,) if scheme.per_tensor else (rows, groups))
    zeros = None
    if not scheme.symmetric:
        zero_words = layer.take("weight_zero_point", torch.int32, (-(-rows * scheme.bits // 32), groups))
        zeros = unpack_integers(zero_words.t().contiguous(), scheme.bits)[:, :rows].t().contiguous()
    order = layer.get("weight_g_idx")
    permutation = None
    if order is not None and not bool((order == -1).all()):  # all -1: the groups are in order
        permutation = layer.group_order("weight_g_idx", group_size, columns)
    q = unpack_integers(words, scheme.bits)
    q = q if permutation is None else q[:, permutation]
    return with_zero_points(q, scales.expand(rows, groups).contiguous(), zeros, scheme.bits, permutation, exact)


def _read_plain(layer: LinearTensors, scheme: Scheme, exact: bool) -> Int8:
    q = layer.take("weight", torch.int8, (None, None))
    rows, columns = q.shape
    groups = columns // layer.group_size(scheme.group_size, columns)
    scales = layer.take("weight_scale", DENSE_DTYPES, (1,) if scheme.per_tensor else (rows, groups))
    scales, _ = kernel_scales(scales.expand(rows, groups).contiguous(), exact=exact)
    return Int8(q, scales, int8_activations=scheme.int8_activations)


def _matches(module: str, pattern: str) -> bool:
    return pattern == "Linear" or _matches_name(module, pattern)


def _matches_name(module: str, pattern: str) -> bool:
    """Return whether a pattern is the layer's name, or ``re:`` and a regular expression that matches its start."""
    if not pattern.startswith("re:"):
        return pattern == module
    return compile_pattern(pattern.removeprefix("re:")).match(module) is not None
